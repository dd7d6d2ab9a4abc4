//! [`Latch`]: a word by which the host holds streams.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::Stream;
use super::drops::{Leftover, give_back_or_keep};
use crate::call::Call;
use crate::caught::caught;
use crate::driver::Driver;
use crate::error::DriverResult;
use crate::types::{DeviceId, PinnedAddress};

/// Room for the word: a cache line, so that nothing else is written where GPUs poll.
const BYTES: u64 = 64;

/// A 32-bit word of page-locked host memory that counts turns. Streams wait for a turn on the GPU,
/// the host opens it by a plain store (rows D-V5, D-V7).
///
/// It is a timeline semaphore that only the host signals. The word starts at 0 and only grows, with
/// wrap-around: turn `a` comes after turn `b` if it is less than 2^31 steps ahead of it.
///
/// One latch holds streams of every device of the driver: the memory is allocated portable, which
/// with unified addressing it would be anyway, and has the same address on all of them.
///
/// # When it may be dropped
///
/// Only when no stream can have a wait on it that it has not passed: the memory is freed at once,
/// whether or not a turn was opened just before. A stream that still waits would read memory that is
/// no longer there, which faults its context for good. The latch cannot know, as a turn that is
/// opened may be passed much later, behind other work of the stream; who holds streams knows, or
/// keeps the latch. The free waits for all work of the latch's device (row D-N18).
#[derive(Debug)]
pub struct Latch {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    word: PinnedAddress,
}

impl Latch {
    /// Makes a latch at turn 0 (`cuMemHostAlloc`, in `device`'s context).
    ///
    /// # Errors
    /// The driver's.
    pub fn create(driver: &Arc<dyn Driver>, device: DeviceId) -> DriverResult<Latch> {
        // Zeroed by the contract.
        let word = caught(Call::MemHostAlloc, || driver.host_alloc(device, BYTES))?;
        Ok(Latch { driver: driver.clone(), device, word })
    }

    /// Later work of `stream` waits until the word has reached `turn` (`cuStreamWaitValue32`); the
    /// host does not wait. A turn that is reached already holds nothing.
    ///
    /// Whoever holds a stream opens the turn on every path, and from a thread that no driver call
    /// can keep waiting for that stream (rows D-V7, D-N1). Until then that thread makes mapping calls,
    /// event queries and further holds only: others may wait for a thread that frees memory, and with
    /// it for the stream (row D-N18). For another thread's per-thread stream
    /// the legacy stream is held, as everywhere (row D-S2). Not for a stream that is being captured:
    /// the wait would become a part of the graph, for each launch.
    ///
    /// # Errors
    /// The driver's; nothing is held then.
    pub fn hold(&self, stream: &Stream, turn: u32) -> DriverResult<()> {
        // SAFETY: `stream` owns a live handle of its own device; the word lives as long as `self`,
        // which is dropped only after the wait is over, by this type's own condition.
        let wait = || unsafe {
            let handle = stream.handle_here();
            self.driver.stream_wait_value32(stream.device(), handle, self.word, turn)
        };
        caught(Call::StreamWaitValue32, wait)
    }

    /// Opens `turn` and all before it. Makes no driver call and cannot fail; what the calling thread
    /// did before is done for whoever was held. A turn that is reached already changes nothing.
    pub fn open(&self, turn: u32) {
        let ahead = |reached: u32| (turn.wrapping_sub(reached) as i32 > 0).then_some(turn);
        // An error says that the word stands there or further: a late opener never closes it again.
        let _ = self.word().fetch_update(Ordering::Release, Ordering::Relaxed, ahead);
    }

    /// The turn that the word has reached.
    pub fn reached(&self) -> u32 {
        self.word().load(Ordering::Acquire)
    }

    fn word(&self) -> &AtomicU32 {
        let word = ptr::with_exposed_provenance_mut::<u32>(self.word.0 as usize);
        // SAFETY: page-locked memory of this driver, aligned to more than a word, which `self` owns
        // and frees when it is dropped, so that it outlives the reference. On the host it is only
        // used through this function, atomically; GPUs only read it.
        unsafe { AtomicU32::from_ptr(word) }
    }
}

impl Drop for Latch {
    fn drop(&mut self) {
        give_back_or_keep(&self.driver, Leftover::Pinned(self.device, self.word));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Chunk, Event, Mapping, Range, failed_drops, retry_failed_drops};
    use super::*;
    use crate::error::ResultCode;
    use crate::sim::{FaultPlan, Sim};
    use crate::types::{AccessGrant, ChunkProps};

    const G: u64 = 2 << 20;
    const FIRST: DeviceId = DeviceId(0);
    const SECOND: DeviceId = DeviceId(1);

    struct Scene {
        sim: Arc<Sim>,
        driver: Arc<dyn Driver>,
        latch: Latch,
    }

    impl Scene {
        fn new() -> Scene {
            let sim = Sim::builder().devices(2).build();
            let driver: Arc<dyn Driver> = sim.clone();
            let latch = Latch::create(&driver, FIRST).unwrap();
            Scene { sim, driver, latch }
        }

        fn stream(&self, device: DeviceId) -> Stream {
            Stream::create(&self.driver, device).unwrap()
        }

        /// An event behind what the stream has now.
        fn mark(&self, stream: &Stream) -> Event {
            let event = Event::create(&self.driver, stream.device()).unwrap();
            event.record(stream).unwrap();
            event
        }

        fn end(self) {
            let Scene { sim, latch, .. } = self;
            drop(latch);
            sim.check_clean().unwrap();
        }
    }

    fn mapped(driver: &Arc<dyn Driver>, device: DeviceId) -> (Range, Mapping) {
        let range = Range::reserve(driver, G, 0, 0).unwrap();
        let chunk = Chunk::create(driver, G, &ChunkProps::on_device(device)).unwrap();
        let mapping = Mapping::map(&range, 0, Arc::new(chunk)).unwrap();
        mapping.set_access(&[AccessGrant::read_write(FIRST)]).unwrap();
        (range, mapping)
    }

    #[test]
    fn a_held_stream_runs_later_work_when_its_turn_is_opened() {
        let scene = Scene::new();
        let stream = scene.stream(FIRST);
        let before = scene.mark(&stream);
        scene.latch.hold(&stream, 2).unwrap();
        let after = scene.mark(&stream);
        assert!(before.passed().unwrap() && !after.passed().unwrap());
        scene.latch.open(1);
        assert!(!after.passed().unwrap(), "an earlier turn is not enough");
        scene.latch.open(2);
        assert!(after.passed().unwrap());
        stream.synchronize().unwrap();
        drop((before, after, stream));
        scene.end();
    }

    #[test]
    fn a_turn_that_is_open_holds_nothing_and_is_never_closed_again() {
        let scene = Scene::new();
        let stream = scene.stream(FIRST);
        scene.latch.open(3);
        scene.latch.open(2);
        assert_eq!(scene.latch.reached(), 3);
        for turn in [1, 3] {
            scene.latch.hold(&stream, turn).unwrap();
        }
        assert!(scene.mark(&stream).passed().unwrap());
        drop(stream);
        scene.end();
    }

    #[test]
    fn turns_wrap_around() {
        let scene = Scene::new();
        let stream = scene.stream(FIRST);
        // In steps of less than half the way round.
        for turn in [u32::MAX / 3, u32::MAX / 3 * 2, u32::MAX] {
            scene.latch.open(turn);
        }
        assert_eq!(scene.latch.reached(), u32::MAX);
        scene.latch.hold(&stream, 1).unwrap();
        let after = scene.mark(&stream);
        scene.latch.open(0);
        assert_eq!((scene.latch.reached(), after.passed().unwrap()), (0, false));
        scene.latch.open(1);
        assert!(after.passed().unwrap());
        scene.latch.open(u32::MAX);
        assert_eq!(scene.latch.reached(), 1, "the past does not come back");
        drop((after, stream));
        scene.end();
    }

    #[test]
    fn one_latch_holds_streams_of_two_devices() {
        let scene = Scene::new();
        let streams = [FIRST, SECOND].map(|device| scene.stream(device));
        for stream in &streams {
            scene.latch.hold(stream, 1).unwrap();
        }
        let marks = [0, 1].map(|at| scene.mark(&streams[at]));
        assert!(marks.iter().all(|mark| !mark.passed().unwrap()));
        std::thread::scope(|scope| scope.spawn(|| scene.latch.open(1)).join().unwrap());
        assert!(marks.iter().all(|mark| mark.passed().unwrap()));
        drop((marks, streams));
        scene.end();
    }

    #[test]
    fn the_memory_behind_an_address_is_exchanged_while_its_stream_is_held() {
        let scene = Scene::new();
        let (user, mover) = (scene.stream(FIRST), scene.stream(FIRST));
        let (range, old) = mapped(&scene.driver, FIRST);
        let (spare, new) = mapped(&scene.driver, SECOND);
        range.fill(FIRST, 0, G, 7).unwrap();
        scene.latch.hold(&user, 1).unwrap();
        // SAFETY: the range is this driver's.
        unsafe { user.fill(range.address() + G / 2, G / 2, 9).unwrap() };
        // SAFETY: both ranges are this driver's, and a chunk long.
        unsafe { mover.copy(spare.address(), range.address(), G).unwrap() };
        scene.mark(&mover).wait().unwrap();
        let chunk = new.unmap().unwrap();
        drop(old.unmap().unwrap());
        let moved = Mapping::map(&range, 0, chunk).unwrap();
        moved.set_access(&[AccessGrant::read_write(FIRST)]).unwrap();
        scene.latch.open(1);
        user.synchronize().unwrap();
        let mut bytes = [0; 2];
        range.read(FIRST, G / 2 - 1, &mut bytes).unwrap();
        assert_eq!(bytes, [7, 9], "the copied byte, and the one written after the exchange");
        drop((moved, range, spare, user, mover));
        scene.end();
    }

    #[test]
    fn a_refused_hold_holds_nothing_and_a_refused_free_is_kept() {
        let scene = Scene::new();
        let stream = scene.stream(FIRST);
        scene.sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::StreamWaitValue32).once());
        assert_eq!(scene.latch.hold(&stream, 1).unwrap_err().code(), ResultCode::UNKNOWN);
        assert!(scene.mark(&stream).passed().unwrap());
        drop(stream);
        let Scene { sim, driver, latch } = scene;
        sim.inject(FaultPlan::fail(ResultCode::UNKNOWN).on(Call::MemFreeHost).once());
        drop(latch);
        assert_eq!(failed_drops(&driver).len(), 1);
        assert!(sim.check_clean().is_err());
        assert_eq!(retry_failed_drops(&driver), 0);
        sim.check_clean().unwrap();
    }

    #[test]
    fn threads_share_a_latch() {
        fn shared<T: Send + Sync>() {}
        shared::<Latch>();
    }
}
