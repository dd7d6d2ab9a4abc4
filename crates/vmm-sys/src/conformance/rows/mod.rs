//! The table of contents: every row of `docs/DRIVER.md`, in its order.

mod access;
mod behind;
mod beyond;
mod broken;
mod capture;
mod context;
mod cost;
mod create;
mod export;
mod handle;
mod held;
mod holes;
mod legacy_stream;
mod map;
mod moves;
mod new_streams;
mod past_end;
mod pointer;
mod reserve;
mod stream;
mod unmap;

use super::bench::Bench;
use super::outcome::Outcome;
use super::row::{Case, Needs, ONLY, Row, RowKind};

/// A row with a known answer.
const fn check(
    id: &'static str,
    group: &'static str,
    title: &'static str,
    needs: Needs,
    run: fn(&Bench) -> Outcome,
) -> Row {
    Row { id, group, title, kind: RowKind::Check, needs, cases: ONLY, run }
}

/// A row whose answer the table does not have.
const fn observe(
    id: &'static str,
    title: &'static str,
    needs: Needs,
    run: fn(&Bench) -> Outcome,
) -> Row {
    Row { id, group: "open", title, kind: RowKind::Observe, needs, cases: ONLY, run }
}

impl Row {
    const fn with_cases(self, cases: &'static [Case]) -> Row {
        Row { cases, ..self }
    }
}

const ONE: Needs = Needs::DEVICE;
const TWO: Needs = Needs::PEER;
const OWN: Needs = Needs::OWN_DRIVER;
const TWO_OWN: Needs = Needs::PEER_OWN_DRIVER;
const PROCESS: Needs = Needs::PROCESS;

/// Every row, once, in the order of the table.
#[rustfmt::skip]
pub const ROWS: &[Row] = &[
    check("D-R1", "reserve", "sizes off the granularity are refused", ONE, reserve::d_r1),
    check("D-R2", "reserve", "alignment 3 is refused", ONE, reserve::d_r2),
    check("D-R3", "reserve", "a large alignment is kept", ONE, reserve::d_r3),
    check("D-R4", "reserve", "a hint is never a promise", ONE, reserve::d_r4),
    check("D-R5", "reserve", "a range extends in place; chunks cross the seam", ONE, reserve::d_r5),
    check("D-R6", "reserve", "16 TiB are a range", ONE, reserve::d_r6),
    check("D-R7", "reserve", "addresses end at about 128 TiB", ONE, reserve::d_r7),
    check("D-C1", "create", "sizes off the granularity are refused", ONE, create::d_c1),
    check("D-C2", "create", "a device that is not there", ONE, create::d_c2),
    check("D-C3", "create", "more than is free is refused", ONE, create::d_c3),
    check("D-C4", "create", "memory is committed at create", ONE, create::d_c4),
    check("D-C5", "create", "fresh memory is zero", ONE, create::d_c5),
    check("D-C6", "create", "20,000 handles at once", ONE, create::d_c6),
    check("D-C7", "create", "fabric: an attribute is no promise", ONE, create::d_c7),
    check("D-C8", "create", "RDMA flag; host NUMA memory", ONE, create::d_c8)
        .with_cases(create::C8_CASES),
    check("D-M1", "map", "a chunk is mapped whole", ONE, map::d_m1),
    check("D-M2", "map", "addresses that take no mapping", ONE, map::d_m2),
    check("D-M3", "map", "a taken slot is refused", ONE, map::d_m3),
    check("D-M4", "map", "an alias sees the same bytes", ONE, map::d_m4),
    check("D-M5", "map", "no access: copies are refused", ONE, map::d_m5),
    check("D-M6", "map", "no access: kernels break the context", OWN, map::d_m6)
        .with_cases(map::M6_CASES),
    check("D-A1", "access", "what set access refuses", ONE, access::d_a1),
    check("D-A2", "access", "one call over whole mappings", ONE, access::d_a2),
    check("D-A3", "access", "the host is no grantee", ONE, access::d_a3),
    check("D-A4", "access", "read only", ONE, access::d_a4),
    check("D-A5", "access", "access taken back", ONE, access::d_a5),
    check("D-A6", "access", "a remap starts with none", ONE, access::d_a6),
    check("D-A7", "access", "a peer needs only the grant", TWO, access::d_a7),
    check("D-A8", "access", "the current context decides", TWO, access::d_a8),
    check("D-A9", "access", "what lies behind a hole gets no access", ONE, access::d_a9),
    check("D-U1", "unmap", "parts of a mapping are refused", ONE, unmap::d_u1),
    check("D-U2", "unmap", "holes are no matter", ONE, unmap::d_u2),
    check("D-U3", "unmap", "several mappings in one call", ONE, unmap::d_u3),
    check("D-U4", "unmap", "unmap does not wait; the kernel faults", OWN, unmap::d_u4)
        .with_cases(unmap::U4_CASES),
    check("D-H1", "handle", "memory stays until the last unmap", ONE, handle::d_h1),
    check("D-H2", "handle", "released twice is refused", ONE, handle::d_h2),
    check("D-H3", "handle", "retain by address", ONE, handle::d_h3),
    check("D-F1", "free", "a range is freed whole, empty, once", ONE, handle::d_f1),
    check("D-P1", "pointer", "the address range is the chunk's", ONE, pointer::d_p1),
    check("D-P2", "pointer", "pointer attributes of a mapping", ONE, pointer::d_p2),
    check("D-P3", "pointer", "the other allocator's calls refuse", ONE, pointer::d_p3),
    check("D-X1", "export", "only what was made for it", ONE, export::d_x1),
    check("D-X2", "export", "an import is another handle", ONE, export::d_x2),
    check("D-X3", "export", "descriptors that are no exports", ONE, export::d_x3),
    check("D-X4", "export", "memory outlives its maker", PROCESS, export::d_x4),
    check("D-X5", "export", "an import keeps its size", ONE, export::d_x5),
    check("D-X6", "export", "a descriptor holds the memory", ONE, export::d_x6),
    check("D-X7", "export", "events of another process", PROCESS, beyond::d_x7),
    check("D-X8", "export", "dma-bufs of mapped memory", ONE, beyond::d_x8),
    check("D-X9", "export", "a dma-buf holds the memory", ONE, beyond::d_x9),
    check("D-X10", "export", "an import for reading is not written", PROCESS, beyond::d_x10),
    check("D-X11", "export", "a chunk exported twice", ONE, beyond::d_x11),
    check("D-X12", "export", "properties of an import", PROCESS, beyond::d_x12),
    check("D-X13", "export", "host memory as a descriptor", Needs::HOST_NUMA, export::d_x13),
    check("D-G1", "capture", "VMM calls do not disturb it", ONE, capture::d_g1),
    check("D-G2", "capture", "its own thread's unsafe calls end it", ONE, capture::d_g2),
    check("D-G3", "capture", "other threads, by mode", ONE, capture::d_g3),
    check("D-G4", "capture", "a relaxed thread harms none", ONE, capture::d_g4),
    check("D-G5", "capture", "the legacy stream beside a capture", OWN, legacy_stream::d_g5)
        .with_cases(legacy_stream::G5_CASES),
    check("D-S1", "stream", "handles come back, ids do not", ONE, stream::d_s1),
    check("D-S2", "stream", "what the legacy stream waits for", ONE, stream::d_s2),
    check("D-S3", "stream", "what ended threads left on theirs", OWN, legacy_stream::d_s3),
    check("D-V1", "move", "graphs follow the address", TWO, moves::d_v1),
    check("D-V2", "move", "aliases are in stream order", ONE, moves::d_v2),
    check("D-V3", "move", "alias first, retire later", ONE, moves::d_v3),
    check("D-V4", "move", "kernels beside remaps", ONE, moves::d_v4),
    check("D-V5", "move", "swap under a held stream", ONE, moves::d_v5),
    check("D-V6", "move", "an importer grants its own device", Needs::PEER_PROCESS, export::d_v6),
    check("D-V7", "move", "a held stream holds nobody else", ONE, held::d_v7)
        .with_cases(held::V7_CASES),
    check("D-K1", "fork", "a forked child has no driver", ONE, stream::d_k1),
    check("D-N1", "held", "calls beside a held stream", ONE, held::d_n1),
    check("D-N2", "held", "new streams beside a held one", OWN, new_streams::d_n2)
        .with_cases(new_streams::N2_CASES),
    check("D-N3", "held", "calls beside the other device's held stream", TWO, held::d_n3),
    check("D-N4", "context", "VMM calls without a context", ONE, context::d_n4),
    check("D-N5", "handle", "handles never given out are followed", OWN, handle::d_n5)
        .with_cases(handle::N5_CASES),
    check("D-N6", "access", "what get access says", ONE, access::d_n6),
    observe("D-N7", "one call over many chunks", ONE, cost::d_n7),
    check("D-N8", "fault", "VMM calls after a fault", OWN, broken::d_n8),
    observe("D-N9", "mappings past the end of a range", OWN, past_end::d_n9)
        .with_cases(past_end::N9_CASES),
    observe("D-N10", "set access over holes and halves", OWN, holes::d_n10)
        .with_cases(holes::N10_CASES),
    observe("D-N11", "which hints are kept", OWN, reserve::d_n11),
    observe("D-N12", "whom get access means by the host", OWN, access::d_n12),
    observe("D-N13", "handles whose memory is gone", OWN, handle::d_n13)
        .with_cases(handle::N13_CASES),
    observe("D-N14", "the other device after a fault", TWO_OWN, broken::d_n14)
        .with_cases(broken::N14_CASES),
    observe("D-N15", "which new streams wait beside a held one", OWN, new_streams::d_n15)
        .with_cases(new_streams::N15_CASES),
    observe("D-N16", "first uses beside a held stream", OWN, new_streams::d_n16),
    observe("D-N17", "as D-N9, in the suite's process", ONE, past_end::d_n17),
    check("D-N18", "held", "calls beside a thread that waits for a held stream", OWN, behind::d_n18)
        .with_cases(behind::N18_CASES),
    observe("D-N19", "what else a dma-buf can be had of", ONE, beyond::d_n19),
    check("D-N20", "capture", "the identity of a captured stream", ONE, capture::d_n20),
];
