//! Small questions to buffers and pools, what their types say in words, and what is refused at once.
use std::sync::Arc;

use crate::common::elastic::{G, machine, on, written};
use vmm_pool::{BalanceVerdict, Budget, ElasticError, Error, Growth, Place, Pool};
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Access, Call, DeviceId, Driver, ResultCode};

const HOME: DeviceId = DeviceId(0);
const PEER: DeviceId = DeviceId(1);

#[test]
fn a_pool_tells_its_buffers_and_their_chunks() {
    let machine = machine(2, |sim| sim, |pool| pool.exportable(true));
    let quota = Budget::new(8 * G);
    let builder = machine.pool.elastic(HOME).capacity_bytes(16 * G).chunk_bytes(G);
    let buffer = builder.quota(quota.clone()).build().unwrap();
    assert_eq!(buffer.quota_room_bytes(), 8 * G);
    buffer.grow(3 * G).unwrap();
    assert_eq!(buffer.quota_room_bytes(), 5 * G);
    let free = machine.buffer(1, 4 * G);
    assert_eq!(free.quota_room_bytes(), u64::MAX, "it has none");
    free.grow(Growth::from(G)).unwrap();
    assert_eq!(machine.pool.elastic_mappings(), 4);
    let mut committed: Vec<u64> =
        machine.pool.elastic_stats().iter().map(|stats| stats.committed_bytes / G).collect();
    committed.sort_unstable();
    assert_eq!(committed, [1, 3]);
    let ours = Arc::as_ptr(&machine.driver);
    assert!(std::ptr::addr_eq(Arc::as_ptr(buffer.driver()), ours));
    assert!(buffer.is_exportable() && free.is_exportable(), "as the builder of the pool said");
    let stream = machine.stream(0);
    let using = buffer.use_on(&stream).unwrap();
    assert_eq!(using.stream().handle(), stream.handle());
    assert!(
        format!("{buffer:?}").contains(&format!("{} of {} bytes", 3 * G, 16 * G)),
        "{buffer:?}"
    );
    assert!(format!("{using:?}").contains("Use"), "{using:?}");
    assert!(format!("{quota:?}").contains(&(3 * G).to_string()), "{quota:?}");
    drop((using, buffer, free, stream));
    machine.end();
}

#[test]
fn the_policy_is_told_as_it_was_set() {
    let machine = machine(3, |sim| sim, |pool| pool.access(HOME, PEER, Access::Read));
    let of = |accessor| machine.pool.access(HOME, DeviceId(accessor));
    assert_eq!(
        [0, 1, 2].map(|it| of(it).unwrap()),
        [Access::ReadWrite, Access::Read, Access::None]
    );
    let error = machine.pool.access(DeviceId(7), HOME).unwrap_err();
    assert!(matches!(error, Error::UnknownDevice { device: DeviceId(7) }), "{error}");
    // What is so already costs nothing, and a home has all access to itself.
    let before = machine.driver.ledger().snapshot();
    machine.pool.grant(HOME, PEER, Access::Read).unwrap();
    machine.pool.grant(HOME, HOME, Access::ReadWrite).unwrap();
    let error = machine.pool.grant(HOME, HOME, Access::None).unwrap_err();
    assert!(matches!(error, Error::Elastic(ElasticError::HomeAccess { .. })), "{error}");
    assert_eq!(machine.driver.ledger().snapshot().since(&before).total(), 0);
    let buffer = machine.buffer(0, G);
    buffer.grant(HOME, Access::ReadWrite).unwrap();
    let text = machine.pool.access_matrix().to_string();
    assert!(text.contains("device 1 at memory of device 0: policy reads, "), "{text}");
    machine.pool.grant(PEER, HOME, Access::ReadWrite).unwrap();
    let text = machine.pool.access_matrix().to_string();
    assert!(text.contains("device 0 at memory of device 1: policy reads and writes, "), "{text}");
    drop(buffer);
    machine.end();
}

#[test]
fn buffers_that_cannot_be_are_refused_in_words() {
    let machine = machine(2, |sim| sim, |pool| pool);
    let elastic = || machine.pool.elastic(HOME).chunk_bytes(G);
    let whole = elastic().build().unwrap();
    assert_eq!(whole.capacity_bytes(), machine.driver.device_total_bytes(HOME).unwrap());
    for (code, is_addresses) in [(ResultCode::OUT_OF_MEMORY, true), (ResultCode::UNKNOWN, false)] {
        let plan = FaultPlan::fail(code).on(Call::MemAddressReserve);
        machine.sim.inject(plan);
        let error = elastic().capacity_bytes(4 * G).build().unwrap_err();
        machine.sim.clear_faults();
        assert_eq!(matches!(error, Error::OutOfAddresses { .. }), is_addresses, "{error}");
    }
    drop(whole);
    machine.end();
}

#[test]
fn who_lends_nothing_says_how_to_let_it_lend() {
    let machine = machine(2, |sim| sim.device_bytes_of(0, 8 * G), |pool| pool);
    let buffer = machine.buffer(0, 64 * G);
    let more = Growth::to(32 * G);
    let named = buffer.grow(more.clone().borrow_from([on(1)])).unwrap_err();
    assert!(named.to_string().contains("PoolBuilder::lend gives it a budget"), "{named}");
    let any = buffer.grow(more.borrow_from_any()).unwrap_err();
    assert!(any.to_string().contains("device 0"), "{any}");
    drop(buffer);
    machine.end();
}

#[test]
fn settings_of_places_are_refused_where_there_is_none() {
    let driver: Arc<dyn Driver> = Sim::builder().devices(2).build();
    let build = |change: &dyn Fn(vmm_pool::PoolBuilder) -> vmm_pool::PoolBuilder| {
        change(Pool::builder(driver.clone()).background(false)).build().unwrap_err().to_string()
    };
    let text = build(&|pool| pool.device(DeviceId(2)));
    assert!(text.contains("an ordinal below 2"), "{text}");
    let text = build(&|pool| pool.device(HOME).stock_marks(2 * G, G));
    assert!(text.contains("at most the high mark"), "{text}");
    let text = build(&|pool| pool.device(HOME).host_memory(0, G / 2, 0));
    assert!(text.contains("limit of host memory"), "{text}");
}

#[test]
fn every_verdict_of_the_balance_has_words_of_its_own() {
    let device = PEER;
    let verdicts = [
        BalanceVerdict::NotLooked,
        BalanceVerdict::Balanced,
        BalanceVerdict::Moving,
        BalanceVerdict::NothingCold { device },
        BalanceVerdict::NowhereEmpty { device },
        BalanceVerdict::BudgetSpent { device },
    ];
    let mut words: Vec<String> = verdicts.iter().map(ToString::to_string).collect();
    assert!(words[3..].iter().all(|words| words.starts_with("device 1 is full")), "{words:?}");
    words.sort_unstable();
    words.dedup();
    assert_eq!(words.len(), verdicts.len());
}

/// A move in the background of what cannot be is refused when it is asked for, and not in the thread.
#[test]
fn a_move_of_bytes_beyond_the_buffer_is_refused_when_it_is_asked_for() {
    let machine = machine(2, |sim| sim, |pool| pool);
    let buffer = written(&machine, 2);
    let order = vmm_pool::Move::to(Place::Device(PEER)).range(0..1 << 50);
    let error = buffer.migrate_async(order).unwrap_err();
    assert!(matches!(error, Error::Elastic(ElasticError::BeyondCapacity { .. })), "{error}");
    drop(buffer);
    machine.end();
}
