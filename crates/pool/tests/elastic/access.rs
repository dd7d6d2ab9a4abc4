//! Which devices may use an elastic buffer: policy, grants, pairs that cannot work.
use crate::common::elastic::{G, machine};
use vmm_pool::{ElasticError, Error, PeerFault, PeerVerdict, Place};
use vmm_sys::sim::{FaultPlan, Link};
use vmm_sys::{Access, Call, DeviceId, Location, ResultCode};

const HOME: DeviceId = DeviceId(0);
const PEER: DeviceId = DeviceId(1);

#[test]
fn access_holds_for_memory_that_comes_later() {
    let machine = machine(2, |sim| sim, |pool| pool.access(HOME, PEER, Access::Read));
    let buffer = machine.buffer(0, 16 * G);
    buffer.grow_to(2 * G).unwrap();
    buffer.write(G + 3, b"over the link").unwrap();
    let mut read = [0; 13];
    buffer.read_by(PEER, G + 3, &mut read).unwrap();
    assert_eq!(&read, b"over the link");
    buffer.commit_from(Place::Device(PEER), 4 * G..5 * G).unwrap();
    for piece in buffer.pieces() {
        let access = |device| machine.driver.get_access(piece.address, device).unwrap();
        assert_eq!(access(Location::Device(HOME)), Access::ReadWrite);
        assert_eq!(access(Location::Device(PEER)), Access::Read, "also of its own memory");
    }
    buffer.grant(PEER, Access::ReadWrite).unwrap();
    buffer.grow_to(6 * G).unwrap();
    for piece in buffer.pieces() {
        let access = machine.driver.get_access(piece.address, Location::Device(PEER)).unwrap();
        assert_eq!(access, Access::ReadWrite);
    }
    buffer.revoke(PEER).unwrap();
    buffer.grow_to(7 * G).unwrap();
    for piece in buffer.pieces() {
        let access = machine.driver.get_access(piece.address, Location::Device(PEER)).unwrap();
        assert_eq!(access, Access::None);
    }
    let refused = buffer.read_by(PEER, 0, &mut read).unwrap_err();
    assert!(matches!(refused, Error::Elastic(ElasticError::NoAccess { device: PEER })));
    drop(buffer);
    machine.end();
}

#[test]
fn the_policy_holds_for_lanes_too() {
    let machine = machine(2, |sim| sim, |pool| pool.access(HOME, PEER, Access::ReadWrite));
    let stream = machine.stream(0);
    let lane = machine.pool.lane(&stream).unwrap();
    let buffer = lane.alloc(3 * G).unwrap();
    let access = machine.driver.get_access(buffer.address(), Location::Device(PEER)).unwrap();
    assert_eq!(access, Access::ReadWrite);
    drop((buffer, lane, stream));
    machine.end();
}

/// What the peer may do at each chunk of these addresses.
fn peer_access(
    machine: &crate::common::elastic::Machine,
    address: u64,
    chunks: u64,
) -> Vec<Access> {
    let at = |chunk| address + chunk * G;
    let ask = |chunk| machine.driver.get_access(at(chunk), Location::Device(PEER)).unwrap();
    (0..chunks).map(ask).collect()
}

#[test]
fn a_policy_changes_everywhere_or_nowhere() {
    let machine = machine(2, |sim| sim, |pool| pool.chunk(vmm_pool::ChunkSize::Fixed(G)));
    let stream = machine.stream(0);
    let lane = machine.pool.lane(&stream).unwrap();
    let block = lane.alloc(3 * G).unwrap();
    let following = machine.buffer(0, 16 * G);
    following.grow_to(2 * G).unwrap();
    let differing = machine.pool.elastic(HOME).capacity_bytes(4 * G).chunk_bytes(G);
    let differing = differing.access([]).build().unwrap();
    differing.grow_to(G).unwrap();
    let seen = || {
        let all = [(block.address(), 3), (following.address(), 2), (differing.address(), 1)];
        all.map(|(address, chunks)| peer_access(&machine, address, chunks))
    };
    let set = |access| machine.pool.grant(HOME, PEER, access);
    // The pair is known from here on, so that only grants can fail.
    set(Access::Read).unwrap();
    set(Access::None).unwrap();
    let (none, read) = (Access::None, Access::Read);
    for k in 1..=5 {
        let fault = FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemSetAccess).at(k).once();
        machine.sim.inject(fault);
        set(Access::Read).unwrap_err();
        assert_eq!(seen(), [vec![none; 3], vec![none; 2], vec![none]], "grant {k}");
        assert_eq!(machine.pool.access_matrix().pair(HOME, PEER).unwrap().policy, none);
    }
    set(Access::Read).unwrap();
    assert_eq!(seen(), [vec![read; 3], vec![read; 2], vec![none]]);
    let later = lane.alloc(2 * G).unwrap();
    assert_eq!(peer_access(&machine, later.address(), 2), [read; 2]);
    let newer = machine.buffer(0, 16 * G);
    newer.grow_to(G).unwrap();
    assert_eq!(peer_access(&machine, newer.address(), 1), [read]);
    set(Access::None).unwrap();
    assert_eq!(seen(), [vec![none; 3], vec![none; 2], vec![none]]);
    assert_eq!(peer_access(&machine, later.address(), 2), [none; 2]);
    newer.grant(PEER, Access::ReadWrite).unwrap();
    set(Access::Read).unwrap();
    assert_eq!(peer_access(&machine, newer.address(), 1), [Access::ReadWrite], "its own word");
    let refused = machine.pool.grant(HOME, HOME, Access::Read).unwrap_err();
    assert!(matches!(refused, Error::Elastic(ElasticError::HomeAccess { device: HOME })));
    drop((block, later, lane, stream, following, differing, newer));
    machine.end();
}

/// Threads bring memory to lanes and build buffers while the policy changes.
#[test]
fn a_policy_that_changes_under_way_misses_nothing() {
    let machine = machine(2, |sim| sim, |pool| pool.chunk(vmm_pool::ChunkSize::Fixed(G)));
    let streams: Vec<_> = (0..3).map(|_| machine.stream(0)).collect();
    let lanes: Vec<_> = streams.iter().map(|it| machine.pool.lane(it).unwrap()).collect();
    for round in 0..30 {
        let access = [Access::Read, Access::None, Access::ReadWrite][round % 3];
        let (blocks, buffers) = std::thread::scope(|scope| {
            let growing: Vec<_> = lanes
                .iter()
                .map(|lane| scope.spawn(|| [(); 4].map(|()| lane.alloc(2 * G).unwrap())))
                .collect();
            let building = scope.spawn(|| {
                [(); 4].map(|()| {
                    let buffer = machine.buffer(0, 4 * G);
                    buffer.grow_to(G).unwrap();
                    buffer
                })
            });
            machine.pool.grant(HOME, PEER, access).unwrap();
            let blocks: Vec<_> =
                growing.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
            (blocks, building.join().unwrap())
        });
        for block in &blocks {
            assert_eq!(peer_access(&machine, block.address(), 2), [access; 2], "round {round}");
        }
        for buffer in &buffers {
            assert_eq!(peer_access(&machine, buffer.address(), 1), [access], "round {round}");
        }
        drop((blocks, buffers));
        machine.pool.trim(HOME).unwrap();
    }
    drop((lanes, streams));
    machine.end();
}

#[test]
fn a_buffer_can_differ_from_the_policy() {
    let machine = machine(3, |sim| sim, |pool| pool.access(HOME, PEER, Access::ReadWrite));
    let builder = machine.pool.elastic(HOME).capacity_bytes(4 * G).chunk_bytes(G);
    let buffer = builder.access([(DeviceId(2), Access::Read)]).build().unwrap();
    buffer.grow_to(G).unwrap();
    let of = |device| buffer.access(DeviceId(device));
    assert_eq!([of(0), of(1), of(2)], [Access::ReadWrite, Access::None, Access::Read]);
    let peers = machine.sim.ledger_summary().devices[0].peers;
    assert_eq!(peers, 2, "the policy's anchor, and the buffer");
    drop(buffer);
    machine.end();
}

#[test]
fn a_grant_is_one_call_for_each_piece() {
    let machine = machine(3, |sim| sim, |pool| pool);
    let buffer = machine.buffer(0, 16 * G);
    buffer.grow_to(3 * G).unwrap();
    buffer.commit_from(Place::Device(DeviceId(2)), 8 * G..10 * G).unwrap();
    buffer.grant(PEER, Access::Read).unwrap();
    for access in [Access::ReadWrite, Access::None] {
        let before = machine.driver.ledger().snapshot();
        buffer.grant(PEER, access).unwrap();
        let calls = machine.driver.ledger().snapshot().since(&before);
        assert_eq!((calls.of(Call::MemSetAccess), calls.total()), (5, 5), "{calls}");
        assert_eq!(machine.picture(&buffer).access_of(1), [access; 5]);
    }
    drop(buffer);
    machine.end();
}

#[test]
fn what_could_not_be_taken_back_is_taken_back_later() {
    let machine = machine(2, |sim| sim, |pool| pool.access(HOME, PEER, Access::None));
    let buffer = machine.buffer(0, 16 * G);
    buffer.grow_to(3 * G).unwrap();
    buffer.grant(PEER, Access::Read).unwrap();
    buffer.revoke(PEER).unwrap();
    // The third piece is refused, and so is taking back the second.
    let refuse = || FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemSetAccess);
    machine.sim.inject(refuse().at(3).once());
    machine.sim.inject(refuse().at(4).once());
    buffer.grant(PEER, Access::Read).unwrap_err();
    assert_eq!(machine.sim.faults_fired(), 2);
    let access = |slot: u64| {
        let address = buffer.address() + slot * G;
        machine.driver.get_access(address, Location::Device(PEER)).unwrap()
    };
    assert_eq!((0..3).filter(|slot| access(*slot) != Access::None).count(), 1);
    buffer.grow_to(4 * G).unwrap();
    assert!((0..4).all(|slot| access(slot) == Access::None));
    drop(buffer);
    machine.end();
}

#[test]
fn a_pair_without_a_link_is_named_and_the_memory_stays_usable() {
    let machine = machine(3, |sim| sim.link(0, 1, Link::None), |pool| pool);
    let buffer = machine.buffer(0, 4 * G);
    buffer.grow_to(2 * G).unwrap();
    let before = machine.picture(&buffer);
    let error = buffer.grant(PEER, Access::Read).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("device 1 cannot use memory of device 0"), "{text}");
    assert!(text.contains("link"), "{text}");
    assert_eq!(machine.picture(&buffer), before);
    buffer.grant(DeviceId(2), Access::Read).unwrap();
    buffer.write(0, b"fine").unwrap();
    let matrix = machine.pool.access_matrix();
    let pair = matrix.pair(HOME, PEER).unwrap();
    assert!(matches!(pair.verdict, PeerVerdict::Fails(PeerFault::Refused(_))), "{pair}");
    let pair = matrix.pair(HOME, DeviceId(2)).unwrap();
    assert_eq!((&pair.verdict, pair.buffers, pair.policy), (&PeerVerdict::Works, 1, Access::None));
    assert_eq!(matrix.pair(PEER, HOME).unwrap().verdict, PeerVerdict::Untried);
    assert!(matrix.to_string().contains("does not work"), "{matrix}");
    // A policy that cannot be is found out when the pool is built.
    let policy = vmm_pool::Pool::builder(machine.driver.clone());
    let refused = policy.access(HOME, PEER, Access::Read).build().unwrap_err();
    assert!(matches!(
        refused,
        Error::Elastic(ElasticError::NoPeer { accessor: PEER, owner: HOME, .. })
    ));
    drop(buffer);
    machine.end();
}

#[test]
fn f_d4_a_pool_without_peers_touches_no_other_device() {
    let sim = vmm_sys::sim::Sim::builder().devices(10).max_peers(8).build();
    let driver: std::sync::Arc<dyn vmm_sys::Driver> = sim.clone();
    let pool = vmm_pool::Pool::builder(driver.clone()).background(false).build().unwrap();
    let lane = pool.lane(&vmm_sys::object::Stream::create(&driver, HOME).unwrap()).unwrap();
    drop(lane.alloc(40 * G).unwrap());
    let devices = sim.ledger_summary().devices;
    assert!(devices.iter().all(|device| device.peers == 0), "no access was granted");
    let touched = devices.iter().map(|device| (device.contexts_made, device.used_bytes));
    assert!(touched.skip(1).all(|made| made == (0, 0)), "no context and no memory elsewhere");
    drop((lane, pool, driver));
    sim.check_clean().unwrap();
}

/// The policy for all memory, lanes included, as for one buffer.
#[test]
fn f_d4_the_ninth_peer_of_a_policy_is_refused_and_eight_stay() {
    let machine = machine(10, |sim| sim.max_peers(8), |pool| pool);
    let stream = machine.stream(0);
    let lane = machine.pool.lane(&stream).unwrap();
    let block = lane.alloc(3 * G).unwrap();
    for peer in 1..=8 {
        machine.pool.grant(HOME, DeviceId(peer), Access::ReadWrite).unwrap();
    }
    let error = machine.pool.grant(HOME, DeviceId(9), Access::ReadWrite).unwrap_err();
    assert!(error.to_string().contains("device 9 cannot use memory of device 0"), "{error}");
    block.write(0, b"fine").unwrap();
    let later = lane.alloc(9 * G).unwrap();
    for address in [block.address(), later.address()] {
        let ask = |peer| machine.driver.get_access(address, Location::Device(DeviceId(peer)));
        let seen: Vec<_> = (1..10).map(|peer| ask(peer).unwrap()).collect();
        assert_eq!(seen[..8], [Access::ReadWrite; 8]);
        assert_eq!(seen[8], Access::None);
    }
    drop((block, later, lane, stream));
    machine.end();
}

/// A slice of a GPU, or a confidential one: there are no peers, and everything else works.
#[test]
fn f_x13_a_machine_without_peers_works_and_says_why() {
    let machine = machine(2, |sim| sim.links(Link::None), |pool| pool);
    for device in [0, 1] {
        let lane = machine.pool.lane(&machine.stream(device)).unwrap();
        lane.alloc(3 * G).unwrap().write(0, b"fine").unwrap();
        let buffer = machine.buffer(device, 4 * G);
        buffer.grow_to(2 * G).unwrap();
        let peer = DeviceId(1 - device);
        let refused = buffer.grant(peer, Access::Read).unwrap_err();
        let no_peer = matches!(refused, Error::Elastic(ElasticError::NoPeer { accessor, .. })
            if accessor == peer);
        assert!(no_peer && refused.to_string().contains("link"), "{refused}");
        let moved = buffer.migrate(peer).unwrap_err();
        assert!(matches!(moved, Error::Elastic(_)), "{moved}");
        assert_eq!(buffer.committed_bytes(), 2 * G);
        buffer.write(0, b"fine").unwrap();
    }
    let matrix = machine.pool.access_matrix();
    assert_eq!(matrix.pairs.len(), 2);
    for pair in &matrix.pairs {
        assert!(matches!(pair.verdict, PeerVerdict::Fails(PeerFault::Refused(_))), "{pair}");
    }
    machine.end();
}

#[test]
fn f_d4_the_ninth_peer_is_refused_and_eight_stay() {
    let machine = machine(10, |sim| sim.max_peers(8), |pool| pool);
    let buffer = machine.buffer(0, 4 * G);
    buffer.grow_to(G).unwrap();
    for peer in 1..=8 {
        buffer.grant(DeviceId(peer), Access::Read).unwrap();
    }
    let before = machine.picture(&buffer);
    let error = buffer.grant(DeviceId(9), Access::Read).unwrap_err();
    assert!(error.to_string().contains("device 9 cannot use memory of device 0"), "{error}");
    assert_eq!(machine.picture(&buffer), before);
    buffer.write(0, b"fine").unwrap();
    buffer.revoke(DeviceId(3)).unwrap();
    drop(buffer);
    machine.end();
}

#[test]
fn f_x3_only_devices_that_were_named_are_touched() {
    let sim = vmm_sys::sim::Sim::builder().devices(8).build();
    let driver: std::sync::Arc<dyn vmm_sys::Driver> = sim.clone();
    let pool = vmm_pool::Pool::builder(driver.clone()).background(false);
    let pool = pool.device(DeviceId(2)).access(DeviceId(2), DeviceId(5), Access::Read);
    let pool = pool.build().unwrap();
    let buffer = pool.elastic(DeviceId(2)).capacity_bytes(4 * G).build().unwrap();
    buffer.grow_to(4 * G).unwrap();
    buffer.write(0, &[1; 8]).unwrap();
    let _matrix = pool.access_matrix();
    let made: Vec<usize> =
        (0..8).filter(|device| sim.ledger_summary().devices[*device].contexts_made > 0).collect();
    assert_eq!(made, [2, 5]);
    let refused = pool.elastic(DeviceId(5)).build().unwrap_err();
    assert!(matches!(refused, Error::UnknownDevice { device: DeviceId(5) }));
    drop((buffer, pool, driver));
    sim.check_clean().unwrap();
}

#[test]
fn an_anchor_makes_later_grants_cheap() {
    let machine = machine(2, |sim| sim, |pool| pool.access(HOME, PEER, Access::ReadWrite));
    assert_eq!(machine.stats(0).anchor_bytes, G);
    let buffer = machine.buffer(0, 64 * G);
    let grow = |bytes| {
        let before = machine.driver.ledger().snapshot();
        buffer.grow_to(bytes).unwrap();
        machine.driver.ledger().snapshot().since(&before)
    };
    let first = grow(G);
    assert_eq!((first.of(Call::MemSetAccess), first.total()), (1, 3), "{first}");
    buffer.shrink_to(0).unwrap();
    let before = machine.sim.now_ns();
    grow(G);
    let us = (machine.sim.now_ns() - before) / 1000;
    assert!(us < 110, "no link has to come up: {us} us");
    drop(buffer);
    assert_eq!(machine.stats(0).anchor_bytes, G, "kept as long as the pool");
    machine.end();
}

/// What the driver does not let go of after a trial keeps its chunk, and both are counted once.
#[test]
fn a_trial_that_cannot_be_taken_back_is_counted_once_and_tried_again() {
    for end_at_once in [false, true] {
        let machine = machine(2, |sim| sim, |pool| pool);
        let buffer = machine.buffer(0, 4 * G);
        buffer.grow_to(G).unwrap();
        let refuse = |call| FaultPlan::fail(ResultCode::UNKNOWN).on(call).once();
        machine.sim.inject(refuse(Call::MemSetAccess).at(2));
        machine.sim.inject(refuse(Call::MemUnmap));
        let error = buffer.grant(PEER, Access::Read).unwrap_err();
        assert!(matches!(error, Error::Elastic(ElasticError::NoPeer { .. })), "{error}");
        let stats = machine.stats(0);
        assert_eq!((stats.anchor_bytes, stats.limbo_bytes), (G, 0));
        if !end_at_once {
            buffer.grant(PEER, Access::Read).unwrap();
            assert_eq!(machine.stats(0).anchor_bytes, G);
        }
        drop(buffer);
        machine.end();
    }
}
