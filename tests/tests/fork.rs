//! A process that forks while it has a pool (F-E6): the child's copies are silent, the parent goes
//! on. A program of its own, since a fork copies only the thread that calls it.

use std::mem::ManuallyDrop;
use std::time::Duration;

use vmm_pool::{Error, Pool};
use vmm_pool_tests::{DriverChoice, Machine, MachineSpec, any_driver};
use vmm_sys::sim::FaultPlan;
use vmm_sys::{Call, DeviceId};

/// Runs `child` in a fork, and gives what it says.
fn in_child(child: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child calls only what this test is about, and leaves by `_exit`.
    match unsafe { libc::fork() } {
        -1 => panic!("no fork"),
        0 => {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
            // SAFETY: ends the child without running what the parent registered for its exit.
            unsafe { libc::_exit(i32::from(!outcome.unwrap_or(false))) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: `pid` is the child made above, and `status` outlives the call.
            assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
            libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
        }
    }
}

#[test]
fn f_e6_a_forked_child_is_silent_and_the_parent_goes_on() {
    if any_driver() == DriverChoice::Cuda {
        println!("f_e6: skipped: told on the simulated device");
        return;
    }
    let machine = Machine::simulated(MachineSpec::default());
    let driver = machine.driver().clone();
    let builder = Pool::builder(driver.clone()).stock_marks(8 << 20, 64 << 20);
    let pool = builder.build().unwrap();
    let lane = pool.lane(&machine.stream(0)).unwrap();
    let other = machine.stream(0);
    let mut buffer = lane.alloc(3 << 20).unwrap();
    buffer.record_stream(&other).unwrap();

    // A thread is at the driver, and another looks at the figures, when the process forks.
    let sim = machine.sim().unwrap();
    sim.inject(FaultPlan::delay_real(Duration::from_millis(200)).on(Call::MemCreate).once());
    let growing = {
        let lane = lane.clone();
        std::thread::spawn(move || lane.alloc(100 << 20).map(drop))
    };
    while sim.faults_fired() == 0 {
        std::thread::yield_now();
    }
    // SAFETY: the copies are dropped by the child only: the parent keeps and drops its own.
    let copies = unsafe { (std::ptr::read(&buffer), std::ptr::read(&lane), std::ptr::read(&pool)) };
    let copies = ManuallyDrop::new(copies);
    let silent = in_child(move || {
        let before = driver.ledger().snapshot();
        let refused = matches!(copies.1.alloc(1000), Err(Error::DriverGone))
            && copies.1.alloc(0).is_ok()
            && matches!(copies.2.lane(copies.1.stream()), Err(Error::DriverGone))
            && matches!(copies.2.trim(DeviceId(0)), Err(Error::DriverGone));
        drop(ManuallyDrop::into_inner(copies));
        refused && driver.ledger().snapshot().since(&before).total() == 0
    });
    assert!(silent, "the child made a call, or was answered wrongly");

    growing.join().unwrap().unwrap();
    drop(buffer);
    drop(lane.alloc(1000).unwrap());
    pool.trim(DeviceId(0)).unwrap();
    pool.verify().unwrap();
    drop((lane, pool, other));
    machine.check_clean().unwrap();
}
