//! The figures of an elastic buffer, and its pieces.

use std::collections::HashSet;
use std::sync::Arc;

use vmm_sys::DeviceId;

use super::body::Body;
use super::borrow::add;
use super::sleep::Contents;
use crate::place::Place;

/// One physical piece of an elastic buffer: a chunk at its addresses. Whoever registers the buffer
/// with a NIC or another process has to register each piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Piece {
    /// Where it begins, from the start of the buffer.
    pub offset: u64,
    /// Its device address.
    pub address: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// Where the memory lies.
    pub place: Place,
    /// Whether it is borrowed from there: it may be called back, and moves.
    pub borrowed: bool,
    /// Whether its memory stands at other addresses of the buffer too
    /// ([`ElasticBuffer::share`](crate::ElasticBuffer::share)).
    pub shared: bool,
    /// Whether it can be exported to other processes.
    pub exportable: bool,
    /// The buffer's generation when the piece came: another number at the same offset is other
    /// memory.
    pub generation: u64,
}

/// The figures of an elastic buffer, in bytes unless they say otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ElasticStats {
    /// The home.
    pub device: DeviceId,
    /// The label of its owner.
    pub tag: Option<Arc<str>>,
    /// Addresses reserved. Costs no memory.
    pub reserved_bytes: u64,
    /// Addresses with memory behind them; memory that stands at several counts at each.
    pub committed_bytes: u64,
    /// Physical memory behind them, each chunk once.
    pub physical_bytes: u64,
    /// Addresses whose memory stands at other addresses of the buffer too.
    pub shared_bytes: u64,
    /// The committed bytes by place; the driver's figure of free memory cannot tell whose it is.
    pub by_place: Vec<(Place, u64)>,
    /// What of it is borrowed, by lender; the rest that is not at home was placed there by name.
    pub borrowed: Vec<(Place, u64)>,
    /// The length of its chunks.
    pub chunk_bytes: u64,
    /// What may be committed, with all who share the quota; `u64::MAX` if there is no quota.
    pub quota_bytes: u64,
    /// What all who share the quota have committed.
    pub quota_booked_bytes: u64,
    /// Memory that the driver made for the buffer since it was built.
    pub created_bytes: u64,
    /// Memory that came from the stock since it was built.
    pub from_stock_bytes: u64,
    /// What of that was zeroed first, for others had used it.
    pub scrubbed_bytes: u64,
    /// Memory that had left and came back before it was gone.
    pub returned_bytes: u64,
    /// Memory whose contents moved to another place since it was built.
    pub moved_bytes: u64,
    /// Memory that a move under way has made ahead, beside what is committed.
    pub incoming_bytes: u64,
    /// What became of the contents, if the buffer sleeps.
    pub asleep: Option<Contents>,
    /// Changes of the memory behind the addresses (count).
    pub generation: u64,
    /// Guards of `use_on` that are alive (count).
    pub open_uses: u64,
    /// Guards that were ever made (count).
    pub uses: u64,
    /// Whether growth that was asked for ahead has not begun.
    pub growth_waits: bool,
}

pub(super) fn pieces(body: &Body) -> Vec<Piece> {
    let state = body.state();
    let piece = |(slot, standing): (&u32, &super::state::Standing)| Piece {
        offset: u64::from(*slot) * body.shape.chunk_bytes,
        address: body.address() + u64::from(*slot) * body.shape.chunk_bytes,
        bytes: body.shape.chunk_bytes,
        place: standing.place,
        exportable: body.shape.exportable,
        generation: standing.generation,
        borrowed: standing.is_borrowed(),
        shared: standing.is_shared(),
    };
    state.pieces.iter().map(piece).collect()
}

pub(crate) fn stats(body: &Body) -> ElasticStats {
    let uses = body.uses.counts();
    let quota = body.shape.quota.as_ref();
    let state = body.state();
    let (mut by_place, mut borrowed) = (Vec::new(), Vec::new());
    // Tens of thousands of pieces, few of them shared: only those are told apart.
    let (mut own, mut shared, mut in_common) = (0, 0, HashSet::new());
    for standing in state.pieces.values() {
        match standing.is_shared() {
            true => {
                shared += 1;
                in_common.insert(Arc::as_ptr(&standing.footing));
            }
            false => own += 1,
        }
        add(&mut by_place, standing.place, body.shape.chunk_bytes);
        if standing.is_borrowed() {
            add(&mut borrowed, standing.place, body.shape.chunk_bytes);
        }
    }
    by_place.sort_unstable();
    borrowed.sort_unstable();
    ElasticStats {
        device: state.home,
        tag: body.shape.tag.clone(),
        reserved_bytes: body.range.bytes(),
        committed_bytes: by_place.iter().map(|(_, bytes)| bytes).sum(),
        physical_bytes: (own + in_common.len() as u64) * body.shape.chunk_bytes,
        shared_bytes: shared * body.shape.chunk_bytes,
        by_place,
        borrowed,
        chunk_bytes: body.shape.chunk_bytes,
        quota_bytes: quota.map_or(u64::MAX, crate::Budget::limit_bytes),
        quota_booked_bytes: quota.map_or(0, crate::Budget::booked_bytes),
        created_bytes: state.counts.created_bytes,
        from_stock_bytes: state.counts.stock_bytes,
        scrubbed_bytes: state.counts.scrubbed_bytes,
        returned_bytes: state.counts.returned_bytes,
        moved_bytes: state.counts.moved_bytes,
        incoming_bytes: state.incoming.values().map(|it| it.bytes).sum(),
        asleep: state.asleep.as_ref().map(|asleep| asleep.contents),
        generation: state.generation,
        open_uses: uses.open,
        uses: uses.begun,
        growth_waits: body.ahead.is_waiting(),
    }
}
