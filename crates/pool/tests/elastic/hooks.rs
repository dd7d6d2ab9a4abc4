//! Who is told that the memory behind an elastic buffer changes.
use std::sync::{Arc, Mutex};

use crate::common::elastic::{G, machine};
use vmm_pool::{BackingChange, Cause, ElasticBuffer, ElasticError, Error, Phase};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, ResultCode};

type Heard = Arc<Mutex<Vec<BackingChange>>>;

fn listen(buffer: &ElasticBuffer) -> (Heard, vmm_pool::BackingHook) {
    let heard = Heard::default();
    let into = heard.clone();
    let hook = buffer.on_backing_change(move |change| into.lock().unwrap().push(*change));
    (heard, hook)
}

/// Phase, cause, first slot, slots, generation.
fn told(heard: &Heard) -> Vec<(Phase, Cause, u64, u64, u64)> {
    let heard = std::mem::take(&mut *heard.lock().unwrap());
    let short =
        |it: BackingChange| (it.phase, it.cause, it.offset / G, it.bytes / G, it.generation);
    heard.into_iter().map(short).collect()
}

#[test]
fn changes_are_told_before_and_after_and_when_they_fail() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let buffer = machine.buffer(0, 16 * G);
    let (heard, hook) = listen(&buffer);
    buffer.grow_to(2 * G).unwrap();
    buffer.grow_to(2 * G).unwrap(); // changes nothing
    let (grow, shrink) = (Cause::Commit, Cause::Decommit);
    assert_eq!(told(&heard), [(Phase::Before, grow, 0, 2, 0), (Phase::After, grow, 0, 2, 1)]);
    machine.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemSetAccess).once());
    buffer.commit(5 * G..9 * G).unwrap_err();
    assert_eq!(told(&heard), [(Phase::Before, grow, 5, 4, 1), (Phase::Failed, grow, 5, 4, 1)]);
    buffer.shrink_to(G).unwrap();
    assert_eq!(told(&heard), [(Phase::Before, shrink, 1, 1, 1), (Phase::After, shrink, 1, 1, 2)]);
    assert_eq!(buffer.generation(), 2);
    buffer.grow_to(2 * G).unwrap();
    let generations: Vec<u64> = buffer.pieces().iter().map(|piece| piece.generation).collect();
    assert_eq!(generations, [1, 3], "the second piece is other memory than before");
    told(&heard);
    drop(buffer);
    let end = Cause::End;
    assert_eq!(told(&heard), [(Phase::Before, end, 0, 2, 3), (Phase::After, end, 0, 2, 4)]);
    drop(hook);
    machine.end();
}

#[test]
fn a_hook_that_is_dropped_is_told_no_more() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let buffer = machine.buffer(0, 16 * G);
    let (first, first_hook) = listen(&buffer);
    let (second, second_hook) = listen(&buffer);
    drop(first_hook);
    buffer.grow_to(G).unwrap();
    assert_eq!((told(&first).len(), told(&second).len()), (0, 2));
    drop(buffer);
    drop(second_hook); // outlives its buffer
    machine.end();
}

#[test]
fn f_i2_a_hook_may_ask_anything_but_not_change_its_own_buffer() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let stream = machine.stream(0);
    let lane = machine.pool.lane(&stream).unwrap();
    let buffer = Arc::new(machine.buffer(0, 16 * G));
    let other = Arc::new(machine.buffer(0, 16 * G));
    let answers = Arc::new(Mutex::new(Vec::new()));
    let hook = {
        let (own, other, pool) = (Arc::downgrade(&buffer), other.clone(), machine.pool.clone());
        let (lane, answers) = (lane.clone(), answers.clone());
        buffer.on_backing_change(move |change| {
            // At the end there is no handle any more.
            let Some(own) = own.upgrade() else { return };
            for refused in [own.grow_to(9 * G).err(), own.shrink_to(0).err()] {
                answers.lock().unwrap().push(refused.map(|error| match error {
                    Error::Elastic(ElasticError::Busy) => "busy".to_owned(),
                    error => error.to_string(),
                }));
            }
            pool.verify().unwrap();
            assert_eq!(own.generation(), change.generation);
            drop(lane.alloc(5 * G).unwrap());
            let bytes = other.committed_bytes() + G;
            other.grow_to(bytes).unwrap();
        })
    };
    buffer.grow_to(2 * G).unwrap();
    assert_eq!(*answers.lock().unwrap(), vec![Some("busy".to_owned()); 4]);
    assert_eq!(other.committed_bytes(), 2 * G);
    drop(hook);
    drop((buffer, other, lane, stream));
    machine.end();
}

#[test]
fn f_i2_a_hook_that_panics_does_no_harm() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let buffer = machine.buffer(0, 16 * G);
    let bad = buffer.on_backing_change(|_| panic!("a hook of a test"));
    let (heard, hook) = listen(&buffer);
    buffer.grow_to(2 * G).unwrap();
    buffer.shrink_to(0).unwrap();
    assert_eq!(told(&heard).len(), 4, "the others are told all the same");
    buffer.grow_to(G).unwrap();
    drop((bad, hook));
    drop(buffer);
    machine.end();
}

#[test]
fn a_hook_may_unregister_itself() {
    let machine = machine(1, |sim| sim, |pool| pool);
    let buffer = machine.buffer(0, 16 * G);
    let slot: Arc<Mutex<Option<vmm_pool::BackingHook>>> = Arc::default();
    let (calls, own) = (Arc::new(Mutex::new(0)), slot.clone());
    let count = calls.clone();
    let hook = buffer.on_backing_change(move |_| {
        *count.lock().unwrap() += 1;
        drop(own.lock().unwrap().take());
    });
    *slot.lock().unwrap() = Some(hook);
    buffer.grow_to(G).unwrap();
    buffer.grow_to(2 * G).unwrap();
    assert_eq!(*calls.lock().unwrap(), 1);
    drop(buffer);
    machine.end();
}

#[test]
fn a_callback_for_short_memory_may_shrink_other_buffers_and_is_refused_its_own() {
    let shared: Arc<Mutex<Vec<Arc<ElasticBuffer>>>> = Arc::default();
    let answers: Arc<Mutex<Vec<String>>> = Arc::default();
    let (buffers, heard) = (shared.clone(), answers.clone());
    let callback = move |_, _| {
        let mut freed = 0;
        for buffer in buffers.lock().unwrap().iter() {
            match buffer.shrink_to(0) {
                Ok(bytes) => freed += bytes,
                Err(error) => heard.lock().unwrap().push(error.to_string()),
            }
        }
        freed > 0
    };
    let machine = machine(1, |sim| sim.device_bytes(8 * G), |pool| pool.on_shortage(callback));
    for _ in 0..2 {
        let buffer = Arc::new(machine.buffer(0, 16 * G));
        buffer.grow_to(4 * G).unwrap();
        shared.lock().unwrap().push(buffer);
    }
    let growing = shared.lock().unwrap()[1].clone();
    growing.grow_to(8 * G).unwrap();
    let committed: Vec<u64> =
        shared.lock().unwrap().iter().map(|buffer| buffer.committed_bytes()).collect();
    assert_eq!(committed, [0, 8 * G]);
    let answers = std::mem::take(&mut *answers.lock().unwrap());
    assert!(
        !answers.is_empty() && answers.iter().all(|it| it.contains("being changed")),
        "{answers:?}"
    );
    drop(growing);
    shared.lock().unwrap().clear();
    machine.end();
}

/// Two threads that are short of memory, each of which would shrink the other's buffer.
#[test]
fn callbacks_that_shrink_each_others_buffers_end() {
    let shared: Arc<Mutex<Vec<Arc<ElasticBuffer>>>> = Arc::default();
    let buffers = shared.clone();
    let callback = move |_, _| {
        let all = buffers.lock().unwrap().clone();
        all.iter().filter_map(|buffer| buffer.shrink_to(0).ok()).sum::<u64>() > 0
    };
    let machine = machine(1, |sim| sim.device_bytes(8 * G), |pool| pool.on_shortage(callback));
    let both = [machine.buffer(0, 16 * G), machine.buffer(0, 16 * G)].map(Arc::new);
    shared.lock().unwrap().extend(both.iter().cloned());
    std::thread::scope(|scope| {
        for buffer in &both {
            scope.spawn(move || {
                for _ in 0..200 {
                    // The other may hold what is missing, and be growing too.
                    let _short = buffer.grow_to(6 * G).err();
                }
            });
        }
    });
    shared.lock().unwrap().clear();
    drop(both);
    machine.end();
}

/// A callback for short memory that asks a lane for more, which is not to be had either. The growth that
/// asked it has memory in hand meanwhile, and nobody must wait for that.
#[test]
fn a_callback_that_is_short_itself_is_told_so() {
    let wanting: Arc<Mutex<Option<vmm_pool::Lane>>> = Arc::default();
    let lane = wanting.clone();
    let (refused, count) = (Arc::new(Mutex::new(0)), Arc::new(Mutex::new(0)));
    let (said, asked) = (refused.clone(), count.clone());
    let callback = move |_, _| {
        *asked.lock().unwrap() += 1;
        let lane = lane.lock().unwrap().clone();
        let short = lane.is_some_and(|lane| lane.alloc(8 * G).is_err());
        *said.lock().unwrap() += u32::from(short);
        false
    };
    let machine = machine(1, |sim| sim.device_bytes(8 * G), |pool| pool.on_shortage(callback));
    let stream = machine.stream(0);
    *wanting.lock().unwrap() = Some(machine.pool.lane(&stream).unwrap());
    let buffer = machine.buffer(0, 16 * G);
    buffer.grow_to(2 * G).unwrap();
    let error = buffer.grow_to(10 * G).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert_eq!(buffer.committed_bytes(), 2 * G);
    assert!(*refused.lock().unwrap() > 0 && *count.lock().unwrap() > 0);
    wanting.lock().unwrap().take();
    drop((buffer, stream));
    machine.end();
}

/// The hook wants a lock that another thread holds while that one allocates and asks for figures.
#[test]
fn f_i2_a_hook_may_wait_for_a_thread_that_allocates() {
    let outer = Arc::new(Mutex::new(()));
    let (called, calls) = std::sync::mpsc::channel();
    let machine = {
        let outer = outer.clone();
        machine(
            1,
            |sim| sim,
            move |pool| {
                pool.limit_bytes(8 * G).on_shortage(move |_, _| {
                    let _told = called.send(());
                    let _outer = outer.lock().unwrap();
                    false
                })
            },
        )
    };
    let streams = [machine.stream(0), machine.stream(0)];
    let lanes = streams.each_ref().map(|stream| machine.pool.lane(stream).unwrap());
    drop(lanes[1].alloc(G).unwrap());
    let live = lanes[0].alloc(6 * G).unwrap();
    let (done, ends) = std::sync::mpsc::channel();
    let soon = std::time::Duration::from_secs(10);
    std::thread::scope(|scope| {
        let held = outer.lock().unwrap();
        let short = lanes[0].clone();
        scope.spawn(move || {
            assert!(short.alloc(9 * G).unwrap_err().is_out_of_memory());
            done.send(()).unwrap();
        });
        calls.recv_timeout(soon).expect("the hook is called");
        // The other thread is inside of the hook, which waits for the lock held here.
        drop(lanes[1].alloc(G).unwrap());
        assert!(machine.stats(0).live_bytes >= 6 * G);
        drop(live);
        drop(held);
        ends.recv_timeout(soon).expect("all of it ends");
    });
    drop(lanes[0].alloc(8 * G).unwrap());
    drop((lanes, streams));
    machine.end();
}
