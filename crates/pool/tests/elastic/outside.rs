//! Memory that another process or driver may have is given to nobody else.
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};

use crate::common::elastic::{G, Machine, machine, on, with_host};
use vmm_pool::{ElasticBuffer, ElasticError, Error, Phase, Place};
use vmm_sys::object::{Chunk, Mapping, Range};
use vmm_sys::sim::{FaultPlan, Property};
use vmm_sys::{AccessGrant, Call, ChunkProps, DeviceId, HandleTypes, ResultCode};

const HOME: DeviceId = DeviceId(0);

fn exportable(machine: &Machine) -> ElasticBuffer {
    let builder = machine.pool.elastic(HOME).capacity_bytes(64 * G).chunk_bytes(G);
    builder.exportable(true).build().unwrap()
}

/// What the pool has of a device, but for what keeps the links to peers up.
fn held_bytes(machine: &Machine, device: u32) -> u64 {
    let stats = machine.stats(device);
    stats.held_bytes - stats.anchor_bytes
}

/// What of it is taken, in the driver's books.
fn taken_bytes(machine: &Machine, device: u32) -> u64 {
    let summary = machine.sim.ledger_summary();
    summary.devices[device as usize].used_bytes - machine.stats(device).anchor_bytes
}

/// The memory of a descriptor, as whoever got it has it.
fn imported(machine: &Machine, descriptor: impl AsFd) -> (Range, Mapping) {
    let props = ChunkProps { handle_types: HandleTypes::POSIX_FD, ..ChunkProps::on_device(HOME) };
    let chunk = Chunk::import_fd(&machine.driver, descriptor.as_fd(), G, &props).unwrap();
    let range = Range::reserve(&machine.driver, G, 0, 0).unwrap();
    let mapping = Mapping::map(&range, 0, Arc::new(chunk)).unwrap();
    mapping.set_access(&[AccessGrant::read_write(HOME)]).unwrap();
    (range, mapping)
}

#[test]
fn what_was_exported_goes_to_the_driver_and_to_nobody_else() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let buffer = exportable(&machine);
    buffer.grow_to(G).unwrap();
    let mut exported = buffer.export_pieces().unwrap();
    buffer.grow_to(3 * G).unwrap();
    let (range, theirs) = imported(&machine, exported.pop().unwrap().1);
    buffer.shrink_to(0).unwrap();
    let stats = machine.stats(0);
    assert_eq!((stats.stock_bytes, stats.held_bytes), (2 * G, 2 * G), "the exported one is gone");
    let other = exportable(&machine);
    other.grow_to(3 * G).unwrap();
    let figures = other.stats();
    assert_eq!((figures.from_stock_bytes, figures.created_bytes), (2 * G, G));
    range.fill(HOME, 0, G, 0xEE).unwrap();
    let mut found = vec![1; 3 * G as usize];
    other.read(0, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0), "another process writes a buffer that is not its");
    drop((theirs, range, buffer, other));
    machine.end();
}

#[test]
fn the_end_of_a_buffer_leaves_nothing_that_was_exported() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let buffer = exportable(&machine);
    buffer.grow_to(2 * G).unwrap();
    drop(buffer.export_pieces().unwrap());
    buffer.grow_to(3 * G).unwrap();
    drop(buffer);
    // That the descriptors are closed is not enough: whoever imported one needs it no more.
    assert_eq!(machine.stats(0).stock_bytes, G);
    machine.end();
}

#[test]
fn what_the_driver_does_not_take_back_is_kept_from_everybody() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let buffer = exportable(&machine);
    buffer.grow_to(G).unwrap();
    drop(buffer.export_pieces().unwrap());
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemRelease).once());
    buffer.shrink_to(0).unwrap();
    assert_eq!(machine.stats(0).stock_bytes, G, "still owned");
    let other = exportable(&machine);
    other.grow_to(G).unwrap();
    assert_eq!((other.stats().from_stock_bytes, other.stats().created_bytes), (0, G));
    assert_eq!(machine.stats(0).held_bytes, 2 * G);
    assert_eq!(machine.pool.trim(HOME).unwrap(), G);
    assert_eq!(machine.stats(0).held_bytes, G);
    drop((buffer, other));
    machine.end();
}

#[test]
fn memory_that_comes_back_to_its_own_buffer_stays_marked() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let (buffer, stream) = (exportable(&machine), machine.stream(0));
    buffer.grow_to(G).unwrap();
    drop(buffer.export_pieces().unwrap());
    let hold = machine.sim.hold(HOME, stream.handle()).unwrap();
    drop(buffer.use_on(&stream).unwrap());
    buffer.shrink_to(0).unwrap();
    buffer.grow_to(G).unwrap();
    assert_eq!(buffer.stats().returned_bytes, G);
    machine.sim.release_hold(hold);
    buffer.shrink_to(0).unwrap();
    assert_eq!(machine.stats(0).held_bytes, 0);
    drop((buffer, stream));
    machine.end();
}

#[test]
fn a_move_leaves_exported_memory_to_the_driver() {
    let machine = with_host();
    let buffer = exportable(&machine);
    let host = Place::HostNuma(0);
    buffer.grow_to(2 * G).unwrap();
    for to in [on(1), host, on(0)] {
        drop(buffer.export_pieces().unwrap());
        buffer.migrate(to).unwrap();
        let held = (held_bytes(&machine, 0), held_bytes(&machine, 1));
        let on_host = machine.pool.stats().hosts[0].held_bytes;
        assert_eq!(held.0 + held.1 + on_host, 2 * G, "to {to}: {held:?}, {on_host} on the host");
    }
    // What it has by now was never exported.
    buffer.shrink_to(0).unwrap();
    assert_eq!(machine.stats(0).stock_bytes, 2 * G);
    drop(buffer);
    machine.end();
}

#[test]
fn dma_bufs_are_of_runs_of_pieces_and_of_one_generation() {
    let machine = machine(2, |sim| sim, |pool| pool);
    let buffer = exportable(&machine);
    buffer.grow_to(2 * G).unwrap();
    buffer.commit(5 * G..6 * G).unwrap();
    buffer.commit_from(on(1), 6 * G..8 * G).unwrap();
    let made = buffer.dma_bufs().unwrap();
    let spans: Vec<_> = made.iter().map(|it| (it.offset / G, it.bytes / G)).collect();
    assert_eq!(spans, [(0, 2), (5, 1), (6, 2)]);
    for dma_buf in &made {
        assert_eq!(dma_buf.generation, buffer.generation());
        assert_eq!(dma_buf.address, buffer.address() + dma_buf.offset);
        let places = dma_buf.pieces.iter().map(|piece| piece.place);
        assert_eq!(places.collect::<Vec<_>>().len() as u64 * G, dma_buf.bytes);
    }
    // They name memory, not addresses: a move leaves it to whoever has them.
    let generation = made[0].generation;
    buffer.migrate(on(1)).unwrap();
    assert!(buffer.generation() > generation);
    assert_eq!(held_bytes(&machine, 0), 0);
    assert_eq!(taken_bytes(&machine, 0), 3 * G);
    drop(made);
    assert_eq!(taken_bytes(&machine, 0), 0);
    drop(buffer);
    machine.end();
}

#[test]
fn a_hook_says_when_dma_bufs_are_to_be_closed() {
    let machine = machine(2, |sim| sim, |pool| pool);
    let buffer = Arc::new(exportable(&machine));
    buffer.grow_to(2 * G).unwrap();
    let registered = Arc::new(Mutex::new(buffer.dma_bufs().unwrap()));
    let kept = registered.clone();
    let hook = buffer.on_backing_change(move |change| {
        if change.phase == Phase::Before {
            kept.lock().unwrap().clear();
        }
    });
    buffer.migrate(on(1)).unwrap();
    assert_eq!(taken_bytes(&machine, 0), 0);
    *registered.lock().unwrap() = buffer.dma_bufs().unwrap();
    assert_eq!(registered.lock().unwrap()[0].generation, buffer.generation());
    drop((hook, registered, buffer));
    machine.end();
}

#[test]
fn memory_behind_a_dma_buf_goes_to_the_driver_and_to_nobody_else() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let buffer = exportable(&machine);
    buffer.grow_to(2 * G).unwrap();
    drop(buffer.dma_bufs().unwrap());
    buffer.shrink_to(0).unwrap();
    assert_eq!(machine.stats(0).held_bytes, 0);
    drop(buffer);
    machine.end();
}

#[test]
fn a_dma_buf_that_cannot_be_had_says_why() {
    let call = Call::MemGetHandleForAddressRange;
    let refuse =
        |sim: vmm_sys::sim::SimBuilder| sim.refuse(Property::Any, call, ResultCode::NOT_SUPPORTED);
    let machine = machine(1, refuse, |pool| pool);
    let plain = machine.buffer(0, 4 * G);
    let refused = plain.dma_bufs().unwrap_err();
    assert!(matches!(refused, Error::Elastic(ElasticError::NotExportable)), "{refused}");
    let buffer = exportable(&machine);
    assert!(buffer.dma_bufs().unwrap().is_empty(), "nothing is committed");
    buffer.grow_to(G).unwrap();
    let Error::Driver(error) = buffer.dma_bufs().unwrap_err() else { panic!() };
    assert_eq!((error.call(), error.code()), (call, ResultCode::NOT_SUPPORTED));
    drop((plain, buffer));
    machine.end();
}

/// Exportable memory was asked for: that it cannot be had is an error, and all else works.
#[test]
fn f_h2_what_was_required_and_is_refused_is_an_error_and_the_rest_works() {
    let refusals = [Call::MemCreate, Call::MemMap, Call::MemSetAccess];
    let exporting = [Call::MemExportToShareableHandle];
    for call in refusals.into_iter().chain(exporting) {
        for code in [999, 800, 801, 1, 101].map(ResultCode) {
            let machine = machine(1, |sim| sim.refuse(Property::PosixFd, call, code), |pool| pool);
            let buffer = exportable(&machine);
            let grown = buffer.grow_to(2 * G);
            let refused = match exporting.contains(&call) {
                true => grown.and_then(|_| buffer.export_pieces().map(drop)).unwrap_err(),
                false => grown.unwrap_err(),
            };
            let Error::Driver(cause) = &refused else { panic!("{call}: {refused}") };
            assert_eq!((cause.call(), cause.code()), (call, code));
            assert!(!refused.is_out_of_memory(), "{refused}");
            let plain = machine.buffer(0, 4 * G);
            plain.grow_to(4 * G).unwrap();
            drop((buffer, plain));
            machine.end();
        }
    }
    // A full device is not an unable one.
    let machine = machine(1, |sim| sim, |pool| pool);
    let buffer = exportable(&machine);
    machine.sim.inject(FaultPlan::fail(ResultCode::OUT_OF_MEMORY).on(Call::MemCreate));
    assert!(buffer.grow_to(G).unwrap_err().is_out_of_memory());
    machine.sim.clear_faults();
    buffer.grow_to(G).unwrap();
    drop(buffer);
    machine.end();
}
