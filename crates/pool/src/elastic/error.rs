//! What can go wrong with an elastic buffer in particular.

use vmm_sys::{DeviceId, DriverError};

use crate::place::Place;

/// An operation of an elastic buffer that did not succeed. The buffer is as it was before.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ElasticError {
    /// More was asked for than addresses were reserved.
    #[error("the end at {end_bytes} bytes lies beyond the buffer's capacity of {capacity_bytes}")]
    BeyondCapacity {
        /// Where the operation would end.
        end_bytes: u64,
        /// What is reserved.
        capacity_bytes: u64,
    },
    /// The buffer's quota, or one that several buffers share, would be passed.
    #[error("{bytes} bytes more would pass the quota: {booked_bytes} of {quota_bytes} are taken")]
    OverQuota {
        /// What was to be committed.
        bytes: u64,
        /// What counts against the quota already.
        booked_bytes: u64,
        /// The quota.
        quota_bytes: u64,
    },
    /// A hook, or a callback for short memory, asked for an operation on a buffer whose memory is
    /// being changed: by the operation that called it, or by another thread, for which it must not
    /// wait.
    #[error(
        "the buffer's memory is being changed, and whoever is called from a change cannot wait"
    )]
    Busy,
    /// The chunks are no multiple of the place's granularity.
    #[error(
        "chunks of {chunk_bytes} bytes cannot lie on {place}: expected a multiple of \
         {granularity_bytes}"
    )]
    ChunkTooFine {
        /// The place.
        place: Place,
        /// The buffer's chunks.
        chunk_bytes: u64,
        /// What chunks there are a multiple of.
        granularity_bytes: u64,
    },
    /// The buffer, or its pool, ended before what was asked for in the background was begun.
    #[error("the buffer or its pool ended before that was begun")]
    Ended,
    /// Memory that was taken from these addresses is still used by work whose end cannot be waited
    /// for: a guard is alive, or a stream is being captured.
    #[error(
        "the addresses at offset {offset} are still used by earlier work: drop the guards of \
         use_on, end the capture, and try again"
    )]
    StillUsed {
        /// Where.
        offset: u64,
    },
    /// Guards of `use_on` are alive, or reads and writes from the host are under way, longer than the
    /// change was willing to wait; at once if one is the calling thread's own.
    #[error(
        "the buffer is in use: {open_uses} guards are alive; drop them, or give the change more \
         patience"
    )]
    InUse {
        /// How many.
        open_uses: u64,
    },
    /// No elastic buffer has the tag.
    #[error("no elastic buffer has the tag {tag:?}")]
    UnknownTag {
        /// The tag.
        tag: std::sync::Arc<str>,
    },
    /// What the home could not give was to be borrowed, and the lenders do not give enough either.
    #[error("nobody lends the {bytes} bytes that are missing: {}; at home: {home}", answers_text(.answers))]
    NobodyLends {
        /// What the home could not give.
        bytes: u64,
        /// The home's shortage.
        home: Box<crate::error::Error>,
        /// What each lender would have given, and why no more, in the order in which they were asked.
        answers: Vec<LenderAnswer>,
    },
    /// A lender does not give what is to move to it.
    #[error("{place} does not lend: {refusal}")]
    NotLent {
        /// The lender.
        place: Place,
        /// Why not.
        refusal: Refusal,
    },
    /// The buffer sleeps.
    #[error("the buffer sleeps: wake it first")]
    Asleep,
    /// A move failed, and the driver refused to bring the memory back to its addresses. The contents
    /// are kept; it is tried again before every operation and every use.
    #[error(
        "the memory at offset {offset} could not be mapped back after a move that failed; its \
         contents are kept, and it is tried again each time: {refused}"
    )]
    Stuck {
        /// Where.
        offset: u64,
        /// What the driver last said to it.
        refused: DriverError,
    },
    /// The buffer's chunks were made without a way to export them, which is fixed when they are
    /// made.
    #[error("the buffer is not exportable: ask for it when it is built")]
    NotExportable,
    /// Nothing is committed at the offset.
    #[error("no memory is committed at offset {offset}")]
    NotCommitted {
        /// The offset.
        offset: u64,
    },
    /// Chunks are shared as a whole, and stand at multiples of their length.
    #[error(
        "{bytes} bytes at offset {from}, to stand at {to} too, are not whole chunks: expected \
         multiples of {chunk_bytes}"
    )]
    NotWhole {
        /// Where they stand.
        from: u64,
        /// Where they are to stand too.
        to: u64,
        /// How many.
        bytes: u64,
        /// The length of the buffer's chunks.
        chunk_bytes: u64,
    },
    /// Memory is committed where chunks are to stand too.
    #[error("memory is committed at offset {offset} already: decommit it first")]
    Occupied {
        /// Where.
        offset: u64,
    },
    /// The bytes to copy lie in both ranges, or behind both: a shared chunk has several addresses.
    #[error("the {bytes} bytes at offset {from} and those at {to}, where they are to go, overlap")]
    Overlap {
        /// Where they come from.
        from: u64,
        /// Where they go.
        to: u64,
        /// How many.
        bytes: u64,
    },
    /// The device has no access to the buffer, or may only read it and was to write.
    #[error("{device} has no access to the buffer: grant it first")]
    NoAccess {
        /// The device.
        device: DeviceId,
    },
    /// The buffer's home always reads and writes it.
    #[error("{device} is the buffer's home, which always reads and writes it")]
    HomeAccess {
        /// The home.
        device: DeviceId,
    },
    /// A device cannot use the memory of another.
    #[error("{accessor} cannot use memory of {owner}: {cause}")]
    NoPeer {
        /// Who was to read or write.
        accessor: DeviceId,
        /// Whose memory it is.
        owner: DeviceId,
        /// Why not.
        cause: PeerFault,
    },
    /// The pool was not told of the place.
    #[error("{place} is no place of this pool's memory")]
    UnknownPlace {
        /// The place.
        place: Place,
    },
    /// The memory of a host node cannot be used by the pool's devices.
    #[error("host NUMA node {node} cannot give memory: {cause}")]
    NoHostMemory {
        /// The node.
        node: u32,
        /// The driver's answer.
        cause: DriverError,
    },
    /// The memory of a host node is short.
    #[error("host NUMA node {node} has no {bytes} bytes left{}", text(.cause))]
    HostShort {
        /// The node.
        node: u32,
        /// What was asked for.
        bytes: u64,
        /// The driver's refusal, unless the pool's own limit came first.
        cause: Option<DriverError>,
    },
}

/// Why a pair of devices does not work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PeerFault {
    /// The driver refuses the grant, or a copy.
    #[error("{0}")]
    Refused(DriverError),
    /// It was granted, and then other bytes were read than were written.
    #[error(
        "granted, but {wrong} of {bytes} bytes came back wrong: switch ACS off in the PCIe bridges, \
         and the IOMMU off or to pass-through"
    )]
    WrongBytes {
        /// How many differ.
        wrong: u64,
        /// How many were read.
        bytes: u64,
    },
}

/// What a lender says to a growth that nobody could serve.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LenderAnswer {
    /// The lender.
    pub place: Place,
    /// What it would have given, in bytes.
    pub gives_bytes: u64,
    /// Why no more.
    pub refusal: Refusal,
}

/// Why a lender gives no more.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Its lending budget.
    #[error("{}", budget_text(*.budget_bytes, *.booked_bytes))]
    Budget {
        /// What it lends at most.
        budget_bytes: u64,
        /// What of that is lent, this growth included.
        booked_bytes: u64,
    },
    /// The pool's limit for it.
    #[error("its limit of {limit_bytes} bytes, of which {held_bytes} are held")]
    Limit {
        /// The limit; where it is larger than what is held, a budget that pools share is exhausted.
        limit_bytes: u64,
        /// What the pool holds there.
        held_bytes: u64,
    },
    /// The driver has no memory there.
    #[error("{cause}")]
    Full {
        /// The driver's refusal.
        cause: DriverError,
    },
    /// The buffer cannot use its memory.
    #[error("{0}")]
    Unusable(Box<crate::error::Error>),
}

fn answers_text(answers: &[LenderAnswer]) -> String {
    if answers.is_empty() {
        return "there is no other place that could lend".to_owned();
    }
    let answer = |it: &LenderAnswer| {
        format!("{} gives {}, and then refuses ({})", it.place, it.gives_bytes, it.refusal)
    };
    answers.iter().map(answer).collect::<Vec<_>>().join("; ")
}

fn budget_text(budget_bytes: u64, booked_bytes: u64) -> String {
    match budget_bytes {
        0 => "it lends nothing: PoolBuilder::lend gives it a budget".to_owned(),
        _ => {
            format!("its lending budget of {budget_bytes} bytes, of which {booked_bytes} are lent")
        }
    }
}

fn text(cause: &Option<DriverError>) -> String {
    cause.as_ref().map_or(String::new(), |cause| format!(" ({cause})"))
}
