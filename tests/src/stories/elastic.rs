//! Elastic buffers: memory comes and goes behind an address that stays.

use std::time::Duration;

use vmm_pool::{AheadState, ElasticBuffer, Place, Pool};
use vmm_sys::object::Stream;
use vmm_sys::{Access, Call, CaptureMode, DeviceId, GraphExecHandle, ProbeKernel};

use super::{G, builder, clean, machine, sound, stats};
use crate::machine::{DriverChoice, Machine, MachineSpec, Skip};

const WORDS: u64 = G / 4;

pub(super) fn two_devices(choice: DriverChoice) -> Result<(Machine, Pool), Skip> {
    let machine = Machine::new(choice, MachineSpec { devices: 2, ..MachineSpec::default() })?;
    let builder = builder(&machine).device(DeviceId(0)).device(DeviceId(1));
    let pool = builder.build().expect("a pool over two devices");
    Ok((machine, pool))
}

pub(super) fn elastic(pool: &Pool, capacity_bytes: u64) -> ElasticBuffer {
    let builder = pool.elastic(DeviceId(0)).capacity_bytes(capacity_bytes).chunk_bytes(G);
    builder.build().expect("addresses are reserved")
}

/// A kernel on `stream` that writes words which count up from `value`, under a guard.
pub(super) fn fill(buffer: &ElasticBuffer, stream: &Stream, offset: u64, value: u32) {
    let using = buffer.use_on(stream).expect("the stream may use it");
    let kernel = ProbeKernel::FillWords { dst: buffer.address() + offset, words: WORDS, value };
    launch(stream, &kernel);
    drop(using);
}

pub(super) fn launch(stream: &Stream, kernel: &ProbeKernel) {
    // SAFETY: the stream is live, and the addresses are committed elastic memory under a guard.
    let launched = unsafe { stream.driver().launch(stream.device(), kernel, stream.handle()) };
    launched.expect("the kernel is launched");
}

/// Whether a chunk holds words that count up from `value`, as `device` reads them.
pub(super) fn holds(buffer: &ElasticBuffer, device: DeviceId, offset: u64, value: u32) -> bool {
    let mut bytes = vec![0; G as usize];
    buffer.read_by(device, offset, &mut bytes).expect("committed memory can be read");
    counts_up(&bytes, value)
}

/// Whether bytes are words that count up from `value`.
pub(super) fn counts_up(bytes: &[u8], value: u32) -> bool {
    let words =
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap_or_default()));
    words.zip(0..).all(|(word, at)| word == value.wrapping_add(at))
}

/// Retires what has passed its gates.
fn tidy(pool: &Pool) {
    pool.trim(DeviceId(0)).expect("the device is trimmed");
}

pub(super) fn elastic_memory_comes_and_goes_in_place(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = super::pool(&machine);
    let stream = machine.stream(0);
    let buffer = elastic(&pool, 1 << 40);
    let address = buffer.address();
    for round in 0..4 {
        assert_eq!(
            buffer.grow_to(8 * G).expect("it grows"),
            if round == 0 { 8 * G } else { 5 * G }
        );
        for slot in 0..8 {
            fill(&buffer, &stream, slot * G, round * 1000 + slot as u32);
        }
        stream.synchronize().expect("the kernels are done");
        assert_eq!(buffer.shrink_to(3 * G).expect("it shrinks"), 5 * G);
        assert!((0..3).all(|slot| holds(
            &buffer,
            DeviceId(0),
            slot * G,
            round * 1000 + slot as u32
        )));
    }
    assert_eq!((buffer.address(), buffer.committed_bytes()), (address, 3 * G));
    let figures = sound(&pool);
    assert_eq!((figures.held_bytes, figures.elastic_bytes), (8 * G, 3 * G));
    drop(buffer);
    assert_eq!(sound(&pool).elastic_bytes, 0);
    drop((pool, stream));
    clean(&machine);
    Ok(())
}

pub(super) fn f_k2_the_pieces_are_what_the_driver_says(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = super::pool(&machine);
    let buffer = elastic(&pool, 64 * G);
    for chunks in [3, 5] {
        buffer.grow_to(chunks * G).expect("it grows");
        let pieces = buffer.pieces();
        let found: Vec<_> = pieces.iter().map(|it| (it.offset, it.bytes)).collect();
        let wanted: Vec<_> = (0..chunks).map(|chunk| (chunk * G, G)).collect();
        assert_eq!(found, wanted, "in order, whole, without a gap");
        for piece in &pieces {
            assert_eq!(piece.address, buffer.address() + piece.offset);
            agrees(&machine, piece.address, piece.bytes);
        }
    }
    buffer.decommit(G..2 * G).expect("a piece goes");
    let offsets: Vec<_> = buffer.pieces().iter().map(|piece| piece.offset / G).collect();
    assert_eq!(offsets, [0, 2, 3, 4], "what is not there is not listed");
    let builder = pool.elastic(DeviceId(0)).capacity_bytes(5 * G).single_piece();
    let whole = builder.build().expect("addresses are reserved");
    whole.grow_to(5 * G).expect("it grows");
    let pieces = whole.pieces();
    assert_eq!(pieces.len(), 1, "one piece was asked for");
    assert_eq!((pieces[0].offset, pieces[0].bytes), (0, 5 * G));
    agrees(&machine, whole.address(), 5 * G);
    drop((buffer, whole, pool));
    clean(&machine);
    Ok(())
}

/// The driver's own range query finds this piece, from its first byte and from its last.
fn agrees(machine: &Machine, address: u64, bytes: u64) {
    for at in [address, address + bytes - 1] {
        let range = machine.driver().address_range(DeviceId(0), at).expect("the range is found");
        assert_eq!(range, (address, bytes), "at {at:#x}");
    }
}

pub(super) fn elastic_memory_waits_for_its_uses(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = super::pool(&machine);
    let (stream, other) = (machine.stream(0), machine.stream(0));
    let buffer = elastic(&pool, 64 * G);
    buffer.grow_to(4 * G).expect("it grows");
    let held = machine.hold(&stream).expect("the stream is held");
    fill(&buffer, &stream, 3 * G, 7);
    let before = machine.driver().ledger().snapshot();
    assert_eq!(buffer.shrink_to(G).expect("it shrinks, and does not wait"), 3 * G);
    fill(&buffer, &other, 0, 3);
    other.synchronize().expect("other streams go on");
    let unmapped = machine.driver().ledger().snapshot().since(&before).of(Call::MemUnmap);
    assert_eq!(unmapped, 0, "the held kernel still writes there");
    assert_eq!(sound(&pool).limbo_bytes, 3 * G);
    held.release().expect("the held work went well");
    stream.synchronize().expect("no fault");
    tidy(&pool);
    assert_eq!(sound(&pool).limbo_bytes, 0);
    assert!(holds(&buffer, DeviceId(0), 0, 3));
    drop((buffer, pool, stream, other));
    clean(&machine);
    Ok(())
}

pub(super) fn elastic_memory_that_comes_back_is_used_in_order(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = super::pool(&machine);
    let (old, new) = (machine.stream(0), machine.stream(0));
    let buffer = elastic(&pool, 64 * G);
    buffer.grow_to(G).expect("it grows");
    let held = machine.hold(&old).expect("the stream is held");
    fill(&buffer, &old, 0, 100);
    buffer.shrink_to(0).expect("it shrinks");
    buffer.grow_to(G).expect("it grows at the same address");
    fill(&buffer, &new, 0, 200);
    held.release().expect("the held work went well");
    old.synchronize().expect("no fault");
    new.synchronize().expect("no fault");
    assert!(holds(&buffer, DeviceId(0), 0, 200), "the later user wrote last");
    sound(&pool);
    drop((buffer, pool, old, new));
    clean(&machine);
    Ok(())
}

pub(super) fn elastic_memory_is_read_and_written_by_a_peer(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let (machine, pool) = two_devices(choice)?;
    let (home, peer) = (DeviceId(0), DeviceId(1));
    let (near, far) = (machine.stream(0), machine.stream(1));
    let buffer = elastic(&pool, 64 * G);
    buffer.grow_to(2 * G).expect("it grows");
    buffer.grant(peer, Access::ReadWrite).map_err(Skip::because)?;
    buffer.grow_to(4 * G).expect("what comes later is granted too");
    fill(&buffer, &near, 3 * G, 10);
    near.synchronize().expect("the home wrote");
    assert!(holds(&buffer, peer, 3 * G, 10));
    fill(&buffer, &far, 2 * G, 20);
    far.synchronize().expect("the peer wrote");
    assert!(holds(&buffer, home, 2 * G, 20));
    // And memory that lies on the peer, at the same addresses.
    buffer.commit_from(Place::Device(peer), 4 * G..5 * G).expect("the peer has memory");
    fill(&buffer, &near, 4 * G, 30);
    near.synchronize().expect("the home wrote to its peer");
    assert!(holds(&buffer, peer, 4 * G, 30) && holds(&buffer, home, 4 * G, 30));
    let far_figures = pool.device_stats(peer).expect("the pool manages it");
    assert_eq!((stats(&pool).elastic_bytes, far_figures.elastic_bytes), (4 * G, G));
    pool.verify().expect("the walker finds nothing");
    buffer.revoke(peer).expect("it is revoked");
    drop((buffer, pool, near, far));
    clean(&machine);
    Ok(())
}

pub(super) fn elastic_memory_lies_on_the_host(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let stream = machine.stream(0);
    let built = builder(&machine).host_memory(0, 16 * G, 0).build();
    let pool = built.map_err(Skip::because)?;
    let buffer = elastic(&pool, 64 * G);
    buffer.grow_to(2 * G).expect("the home has memory");
    buffer.commit_from(Place::HostNuma(0), 2 * G..4 * G).expect("the host has memory");
    for slot in 0..4 {
        fill(&buffer, &stream, slot * G, slot as u32);
    }
    stream.synchronize().expect("no fault");
    assert!((0..4).all(|slot| holds(&buffer, DeviceId(0), slot * G, slot as u32)));
    assert_eq!(sound(&pool).elastic_bytes, 2 * G);
    assert_eq!(pool.stats().hosts[0].elastic_bytes, 2 * G);
    buffer.shrink_to(0).expect("it shrinks");
    tidy(&pool);
    drop((buffer, pool, stream));
    clean(&machine);
    Ok(())
}

/// A graph that fills a chunk with words which count up from `value`. It is launched only while
/// memory is committed there.
pub(super) fn capture_fill(stream: &Stream, dst: u64, value: u32) -> GraphExecHandle {
    capture(stream, &ProbeKernel::FillWords { dst, words: WORDS, value })
}

/// A graph of one kernel. It is launched only while memory stands behind the kernel's addresses.
pub(super) fn capture(stream: &Stream, kernel: &ProbeKernel) -> GraphExecHandle {
    let (driver, device) = (stream.driver(), stream.device());
    // SAFETY: the stream is live; the template is not used after its end.
    unsafe {
        driver.capture_begin(device, stream.handle(), CaptureMode::Global).expect("begins");
        launch(stream, kernel);
        let graph = driver.capture_end(device, stream.handle()).expect("ends");
        let exec = driver.graph_instantiate(device, graph).expect("is instantiated");
        driver.graph_destroy(device, graph).expect("the template goes");
        exec
    }
}

/// Launches a graph that uses the buffer.
pub(super) fn replay(buffer: &ElasticBuffer, stream: &Stream, graph: GraphExecHandle) {
    let _using = buffer.use_on(stream).expect("a guard covers the launch");
    // SAFETY: the stream and the executable are live.
    let launched = unsafe { stream.driver().graph_launch(stream.device(), graph, stream.handle()) };
    launched.expect("launched");
}

pub(super) fn graphs_follow_elastic_memory(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let (pool, stream) = (super::pool(&machine), machine.stream(0));
    let driver = machine.driver().clone();
    let buffer = elastic(&pool, 64 * G);
    buffer.grow_to(G).expect("it grows");
    let graph = capture_fill(&stream, buffer.address(), 5);
    for round in 0..5 {
        replay(&buffer, &stream, graph);
        stream.synchronize().expect("no fault");
        assert!(holds(&buffer, DeviceId(0), 0, 5), "round {round}");
        buffer.decommit(0..G).expect("the memory goes");
        tidy(&pool);
        buffer.grow_to(G).expect("other memory comes");
        buffer.write(0, &[0; 4096]).expect("other contents");
    }
    // SAFETY: the executable is live and not used afterwards.
    unsafe { driver.graph_exec_destroy(DeviceId(0), graph) }.expect("the graph goes");
    sound(&pool);
    drop((buffer, pool, stream, driver));
    clean(&machine);
    Ok(())
}

pub(super) fn elastic_memory_grows_ahead(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = Pool::builder(machine.driver().clone()).build().expect("a pool with a thread");
    let stream = machine.stream(0);
    let buffer = elastic(&pool, 64 * G);
    let growth = buffer.grow_ahead(16 * G).expect("it is asked for");
    assert!(matches!(growth.wait(Duration::from_secs(20)), AheadState::Done), "{growth:?}");
    let before = machine.driver().ledger().snapshot();
    assert_eq!(buffer.grow_to(16 * G).expect("it is there"), 0);
    let calls = machine.driver().ledger().snapshot().since(&before);
    assert_eq!(calls.of(Call::MemCreate) + calls.of(Call::MemMap), 0, "{calls}");
    fill(&buffer, &stream, 15 * G, 1);
    stream.synchronize().expect("no fault");
    assert!(holds(&buffer, DeviceId(0), 15 * G, 1));
    drop((buffer, pool, stream));
    clean(&machine);
    Ok(())
}
