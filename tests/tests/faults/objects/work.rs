//! Streams, events, latches, and what is found out about devices.

use vmm_sys::StreamHandle;
use vmm_sys::object::{Event, Latch, RelaxedCapture, Stream, identity_of};
use vmm_sys::topology::{Topology, try_vmm};

use super::{check_bytes, empty, full};
use crate::engine::Case;
use crate::stage::{HOME, NEXT};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new(
            "object::stream",
            &["Stream::create"],
            empty,
            |bench| {
                bench.streams.push(Stream::create(&bench.driver, NEXT)?);
                Ok(())
            },
            |bench| bench.streams[1].synchronize().unwrap(),
        ),
        Case::new(
            "object::borrowed_streams",
            &["Stream::legacy", "Stream::per_thread", "Stream::from_raw", "identity_of"],
            empty,
            |bench| {
                let legacy = Stream::legacy(&bench.driver, HOME)?;
                let own = Stream::per_thread(&bench.driver, HOME)?;
                // SAFETY: the legacy stream always lives.
                let id = unsafe { identity_of(&bench.driver, HOME, StreamHandle::LEGACY) }?;
                assert_eq!(id, Some(legacy.id()));
                bench.streams.extend([legacy, own]);
                Ok(())
            },
            |bench| bench.streams.iter().for_each(|stream| stream.synchronize().unwrap()),
        ),
        Case::new(
            "object::stream_work",
            &[
                "Stream::wait_event",
                "Stream::call_on_host",
                "Stream::synchronize",
                "Stream::capture_info",
            ],
            full,
            |bench| {
                let stream = &bench.streams[0];
                stream.wait_event(&bench.events[0])?;
                stream.call_on_host(|| {})?;
                stream.synchronize()?;
                stream.capture_info()?;
                Ok(())
            },
            check_bytes,
        ),
        Case::new(
            "object::event",
            &["Event::create", "Event::record", "Event::passed", "Event::wait"],
            full,
            |bench| {
                let event = Event::create(&bench.driver, HOME)?;
                event.record(&bench.streams[0])?;
                event.wait()?;
                assert!(event.passed()?);
                bench.events.push(event);
                Ok(())
            },
            |bench| assert_eq!(bench.events.len(), 2),
        ),
        Case::new(
            "object::latch",
            &["Latch::create", "Latch::hold", "Latch::open"],
            full,
            |bench| {
                let latch = Latch::create(&bench.driver, HOME)?;
                let held = latch.hold(&bench.streams[0], 1);
                latch.open(1);
                held?;
                bench.streams[0].synchronize().inspect_err(|_| {
                    // It is open, so the stream goes on by itself: only the host was not told.
                    assert_eq!(latch.reached(), 1);
                })?;
                Ok(())
            },
            check_bytes,
        ),
        Case::new(
            "object::relaxed_capture",
            &["RelaxedCapture::enter"],
            empty,
            |bench| {
                drop(RelaxedCapture::enter(&bench.driver)?);
                Ok(())
            },
            |_| {},
        ),
        Case::new(
            "topology::try_vmm",
            &["try_vmm"],
            empty,
            |bench| {
                // What is found says so by itself.
                let found = try_vmm(&bench.driver, HOME);
                assert_eq!(found.works(), found.error().is_none());
                Ok(())
            },
            |bench| assert!(try_vmm(&bench.driver, HOME).works()),
        )
        .quiet(),
        Case::new(
            "topology::probe",
            &["Topology::probe"],
            empty,
            |bench| {
                Topology::probe(&bench.driver, &[HOME, NEXT])?;
                Ok(())
            },
            |bench| {
                let found = Topology::probe(&bench.driver, &[HOME, NEXT]).unwrap();
                assert!(found.reaches(HOME, NEXT) && found.reaches(NEXT, HOME));
            },
        ),
    ]
}
