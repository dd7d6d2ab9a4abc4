//! The machine, contexts and threads, costs, time, and the driver's own allocators.

use super::*;
use crate::call::{Call, ThreadTime};
use crate::error::ResultCode as Code;
use crate::sim::TimeMode;

const MIB: u64 = 1 << 20;

#[test]
fn contexts_are_counted_and_only_named_devices_get_one() {
    let sim = Sim::builder().devices(4).context_bytes(64 * MIB).build();
    assert_eq!(sim.device_count().unwrap(), 4);
    sim.can_access_peer(D0, DeviceId(3)).unwrap();
    sim.device_total_bytes(DeviceId(2)).unwrap();
    let context = sim.primary_context_retain(D1).unwrap();
    assert_eq!(sim.primary_context_retain(D1).unwrap(), context);
    assert_eq!(sim.ledger_summary().context_references(), 2);
    assert_eq!(sim.ledger_summary().devices[1].used_bytes, 64 * MIB);
    sim.primary_context_release(D1).unwrap();
    sim.primary_context_release(D1).unwrap();
    assert_eq!(code(sim.primary_context_release(D1)), Code::INVALID_CONTEXT);
    let made: Vec<u64> =
        sim.ledger_summary().devices.iter().map(|device| device.contexts_made).collect();
    assert_eq!(made, [0, 1, 0, 0]);
    assert_eq!(sim.ledger_summary().devices[1].used_bytes, 0);
    // SAFETY: it is dead, which is what is tested.
    let set = unsafe { sim.context_set_current(Some(context)) };
    assert_eq!(code(set), Code::INVALID_CONTEXT);
    assert_eq!(code(sim.primary_context_retain(DeviceId(4))), Code::INVALID_DEVICE);
}

#[test]
fn calls_leave_the_threads_own_context_alone() {
    let sim = sim();
    let context = sim.primary_context_retain(D1).unwrap();
    // SAFETY: the context is live.
    unsafe { sim.context_set_current(Some(context)) }.unwrap();
    sim.mem_info(D0).unwrap();
    assert_eq!(code(sim.mem_alloc(DeviceId(9), 1)), Code::INVALID_DEVICE);
    assert_eq!(sim.context_current().unwrap(), Some(context));
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(sim.context_current().unwrap(), None));
    });
}

#[test]
fn every_device_has_an_identity_of_its_own() {
    let sim = Sim::builder().visible(&[3, 1]).build();
    let other = Sim::builder().devices(4).build();
    assert_eq!(sim.device_uuid(D0).unwrap(), other.device_uuid(DeviceId(3)).unwrap());
    assert_ne!(sim.device_uuid(D0).unwrap(), sim.device_uuid(D1).unwrap());
}

#[test]
fn the_host_time_of_simulating_is_measured_once() {
    let sim = sim();
    sim.ledger().set_timing(true);
    let before = ThreadTime::now();
    let start = std::time::Instant::now();
    for _ in 0..1000 {
        sim.mem_info(D0).unwrap();
    }
    let wall_nanos = start.elapsed().as_nanos();
    let spent_nanos = u128::from(ThreadTime::now().spent_nanos - before.spent_nanos);
    // Disjoint intervals inside of another: true however slow the machine is.
    assert!((1..=wall_nanos).contains(&spent_nanos), "{spent_nanos} of {wall_nanos}");
}

/// Nanoseconds that one call was charged.
fn charged(sim: &Sim, call: Call, work: impl FnOnce()) -> u64 {
    let before = (sim.ledger().snapshot(), sim.now_ns());
    work();
    let nanos = sim.ledger().snapshot().since(&before.0).nanos_of(call);
    assert!(sim.now_ns() - before.1 >= nanos, "the clock goes with the ledger");
    nanos
}

#[test]
fn fresh_memory_costs_more_than_memory_mapped_before() {
    let sim = sim();
    let bytes = 32 * MIB;
    let va = sim.address_reserve(2 * bytes, 0, 0).unwrap();
    let grant = [AccessGrant::read_write(D0)];
    let chunk = sim.create(bytes, &ChunkProps::on_device(D0)).unwrap();
    sim.t_map(va, bytes, chunk).unwrap();
    let access =
        |at: u64| charged(&sim, Call::MemSetAccess, || sim.set_access(at, bytes, &grant).unwrap());
    assert_eq!(access(va), 74_000);
    sim.t_map(va + bytes, bytes, chunk).unwrap();
    assert_eq!(access(va + bytes), 27_000, "an alias");
    let unmap = charged(&sim, Call::MemUnmap, || sim.unmap(va, 2 * bytes).unwrap());
    assert_eq!(unmap, 2 * 17_800, "per mapping, not per call");
    sim.t_map(va, bytes, chunk).unwrap();
    assert_eq!(access(va), 27_000, "a remap");
    sim.unmap(va, bytes).unwrap();
    assert_eq!(charged(&sim, Call::MemRelease, || sim.t_release(chunk).unwrap()), 27_000);
}

#[test]
fn a_peer_grant_is_dear_until_one_mapping_is_kept_alive() {
    let sim = sim();
    let both = [AccessGrant::read_write(D0), AccessGrant::read_write(D1)];
    let bytes = 2 * MIB;
    let again = |grants: &[AccessGrant]| {
        let (va, chunk) = sim.t_mapped(D0, bytes);
        sim.unmap(va, bytes).unwrap();
        sim.t_map(va, bytes, chunk).unwrap();
        let cost = charged(&sim, Call::MemSetAccess, || sim.set_access(va, bytes, grants).unwrap());
        (cost, va)
    };
    let (first, va) = again(&both);
    assert!((960_000..1_000_000).contains(&first), "{first}");
    sim.unmap(va, bytes).unwrap();
    let (second, _anchor) = again(&both);
    assert_eq!(second, first, "the link went down with the last mapping");
    let (anchored, _) = again(&both);
    assert!((50_000..60_000).contains(&anchored), "{anchored}");
    assert_eq!(again(&both[1..]).0, 27_000, "remote only");
    let (va, _) = sim.t_mapped(D0, bytes);
    let add = charged(&sim, Call::MemSetAccess, || sim.set_access(va, bytes, &both[1..]).unwrap());
    assert_eq!(add, 25_000, "a peer added");
}

#[test]
fn exportable_chunks_are_dearer() {
    let sim = sim();
    let plain = ChunkProps::on_device(D0);
    let fd = ChunkProps { handle_types: HandleTypes::POSIX_FD, ..plain };
    let cost = |props: &ChunkProps, call| {
        charged(&sim, call, || {
            let va = sim.address_reserve(2 * MIB, 0, 0).unwrap();
            let chunk = sim.create(2 * MIB, props).unwrap();
            sim.t_map(va, 2 * MIB, chunk).unwrap();
            sim.set_access(va, 2 * MIB, &[AccessGrant::read_write(D0)]).unwrap();
            sim.unmap(va, 2 * MIB).unwrap();
        })
    };
    for call in [Call::MemCreate, Call::MemMap, Call::MemSetAccess, Call::MemUnmap] {
        assert!(cost(&fd, call) > cost(&plain, call), "{call}");
    }
    assert_eq!(cost(&ChunkProps { rdma: true, ..plain }, Call::MemMap), 8000);
}

#[test]
fn modelled_work_takes_its_time_and_a_long_jump_ends_as_short_steps_do() {
    let run = |steps: u64| {
        let sim = Sim::builder().devices(2).time(TimeMode::Modelled).build();
        let (from, _) = sim.t_mapped(D0, 256 * MIB);
        let (to, _) = sim.t_mapped(D1, 256 * MIB);
        let (a, b) = (sim.stream_create(D0).unwrap(), sim.stream_create(D1).unwrap());
        let event = sim.event_create(D0).unwrap();
        let start = sim.now_ns();
        let fill = ProbeKernel::FillWords { dst: from, words: 16 << 20, value: 1 };
        sim.t_launch(D0, fill, a).unwrap();
        let bytes = 256 * MIB;
        let copy = Transfer::Peer { dst: to, dst_device: D1, src: from, src_device: D0, bytes };
        // SAFETY: device addresses only; the stream is live.
        unsafe { sim.copy_async(D0, &copy, a) }.unwrap();
        sim.t_record(D0, event, a).unwrap();
        sim.t_wait(D1, b, event).unwrap();
        sim.busy(D1, b, 100).unwrap();
        assert!(!sim.t_query(D0, event).unwrap());
        assert_eq!(sim.peek(to, 4).unwrap(), [0; 4]);
        for _ in 0..steps {
            sim.advance(1000 / steps);
        }
        assert!(sim.t_query(D0, event).unwrap());
        assert_eq!(sim.peek(to + 4, 4).unwrap(), [2, 0, 0, 0]);
        let before_sync = sim.now_ns();
        sim.t_sync(D1, b).unwrap();
        (before_sync - start, sim.now_ns() - start)
    };
    // 64 MiB at 3,660 GB/s, then 256 MiB at about 390 GB/s, then 100 us: under 1,000 us.
    assert_eq!(run(1), run(100));
    assert_eq!(run(1).0 / 1000, run(1).1 / 1000);
}

#[test]
fn mem_free_waits_for_the_device_and_charges_the_wait() {
    let sim = sim();
    let stream = sim.stream_create(D0).unwrap();
    let address = sim.mem_alloc(D0, 3 * MIB).unwrap();
    sim.t_upload(D0, address + 3 * MIB - 4, b"last").unwrap();
    assert_eq!(code(sim.t_upload(D0, address + 3 * MIB - 4, b"beyond")), Code::INVALID_VALUE);
    sim.busy(D0, stream, 300_000).unwrap();
    let cost = charged(&sim, Call::MemFree, || sim.mem_free(D0, address).unwrap());
    assert!((299_000_000..302_000_000).contains(&cost), "{cost}");
    assert_eq!(code(sim.mem_free(D0, address)), Code::INVALID_VALUE);
    assert_eq!(sim.ledger_summary().devices[0].used_bytes, 0);
}

#[test]
fn legacy_allocations_are_zeroed_packed_and_given_back() {
    let sim = sim();
    let small: Vec<u64> = (0..100).map(|_| sim.mem_alloc(D0, 1000).unwrap()).collect();
    assert_eq!(sim.ledger_summary().devices[0].used_bytes, 2 * MIB);
    sim.t_upload(D0, small[5], &[1; 1000]).unwrap();
    assert_eq!(code(sim.mem_free(D0, small[5] + 512)), Code::INVALID_VALUE);
    for address in small {
        sim.mem_free(D0, address).unwrap();
    }
    assert_eq!(sim.check_clean(), Ok(()));
    assert_eq!(code(sim.mem_alloc(D0, 0)), Code::INVALID_VALUE);
    assert!(sim.mem_alloc(D0, 2 << 30).unwrap_err().is_out_of_memory());
}

#[test]
fn the_stream_ordered_pool_keeps_what_its_threshold_allows() {
    let sim = sim();
    let stream = sim.stream_create(D0).unwrap();
    let used = || sim.ledger_summary().devices[0].used_bytes;
    // SAFETY: the stream is live.
    let alloc = || unsafe { sim.mem_alloc_async(D0, MIB, stream) }.unwrap();
    // SAFETY: as above.
    let free = |address| unsafe { sim.mem_free_async(D0, address, stream) }.unwrap();
    let first = charged(&sim, Call::MemAllocAsync, || free(alloc()));
    assert!(first > 400_000, "{first}");
    assert_eq!(used(), 0, "the default threshold keeps nothing");
    sim.mem_pool_set_release_threshold(D0, u64::MAX).unwrap();
    free(alloc());
    assert_eq!(used(), 32 * MIB);
    assert_eq!(charged(&sim, Call::MemAllocAsync, || free(alloc())), 540, "warm");
    // A free waits for its turn in the stream.
    let hold = sim.hold(D0, stream).unwrap();
    free(alloc());
    assert_eq!(sim.ledger_summary().legacy_allocations, 1);
    sim.release_hold(hold);
    assert_eq!(sim.ledger_summary().legacy_allocations, 0);
}

#[test]
fn the_same_program_gives_the_same_machine_twice() {
    let run = || {
        let sim = Sim::builder().devices(2).seed(11).time(TimeMode::Modelled).build();
        let plan = crate::sim::FaultPlan::fail(Code::OUT_OF_MEMORY).random(200);
        sim.inject(plan.on(Call::MemCreate));
        let stream = sim.stream_create(D0).unwrap();
        let mut chunks = Vec::new();
        for round in 0..200_u64 {
            let device = DeviceId((round % 2) as u32);
            if let Ok(chunk) = sim.create((round % 5 + 1) * G, &ChunkProps::on_device(device)) {
                chunks.push(chunk.0);
            }
            sim.busy(D0, stream, round).unwrap();
        }
        (chunks, sim.now_ns(), sim.ledger_summary(), sim.ledger().snapshot())
    };
    assert_eq!(run(), run());
}

#[test]
fn many_threads_use_one_machine() {
    let sim = sim();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let (va, chunk) = sim.t_mapped(D0, G);
                    sim.t_upload(D0, va, &[1; 8]).unwrap();
                    sim.t_unmapped(va, G, chunk);
                }
            });
        }
    });
    assert_eq!(sim.check_clean(), Ok(()));
    assert_eq!(sim.ledger().snapshot().of(Call::MemCreate), 800);
}
