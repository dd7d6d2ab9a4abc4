//! Captures, the memory of graphs, and the end of a lane.

use vmm_sys::CaptureMode;
use vmm_sys::object::Stream;

use super::{blocks, check_blocks, filled, take};
use crate::engine::Case;
use crate::stage::{G, HOME, Stage, usual};

fn begin_capture(stage: &Stage) {
    let handle = stage.streams[0].handle();
    // SAFETY: a live stream.
    unsafe { stage.driver.capture_begin(HOME, handle, CaptureMode::Relaxed) }.unwrap();
}

fn end_capture(stage: &Stage) {
    let handle = stage.streams[0].handle();
    // SAFETY: a live stream that is being captured; the graph is not used afterwards.
    unsafe {
        let graph = stage.driver.capture_end(HOME, handle).unwrap();
        stage.driver.graph_destroy(HOME, graph).unwrap();
    }
}

/// A graph that has memory.
fn captured() -> Stage {
    let mut stage = filled();
    let scope = stage.lanes[0].capture().unwrap();
    scope.join(&stage.lanes[1]).unwrap();
    begin_capture(&stage);
    stage.alloc(0, 3 * G);
    stage.alloc(1, G);
    end_capture(&stage);
    stage.buffers.truncate(2);
    stage.graphs.push(scope.finish());
    stage
}

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::silent(
            "capture::open",
            &[
                "Lane::capture",
                "CaptureScope::join",
                "CaptureScope::memory",
                "CaptureScope::finish",
            ],
            filled,
            |stage| {
                let scope = stage.lanes[0].capture()?;
                scope.join(&stage.lanes[1])?;
                stage.graphs.push(scope.memory().clone());
                scope.finish();
                Ok(())
            },
        ),
        Case::new(
            "capture::alloc",
            &["Lane::alloc", "Lane::capture"],
            || {
                let mut stage = filled();
                stage.scope = Some(stage.lanes[0].capture().unwrap());
                begin_capture(&stage);
                stage
            },
            |stage| take(stage, 0, 3 * G),
            |stage| {
                end_capture(stage);
                blocks(3)(stage);
            },
        ),
        Case::new(
            "capture::alloc_into",
            &["Lane::capture_into"],
            || {
                let mut stage = captured();
                stage.scope = Some(stage.lanes[0].capture_into(&stage.graphs[0]).unwrap());
                stage
            },
            |stage| take(stage, 0, 5 * G),
            |stage| blocks(3)(stage),
        ),
        Case::silent(
            "graph::launched_on",
            &["GraphMemory::launched_on", "GraphMemory::keep", "GraphMemory::mapped_bytes"],
            captured,
            |stage| {
                stage.graphs[0].launched_on(&stage.streams[2])?;
                stage.graphs[0].keep(stage.buffers.remove(1));
                Ok(())
            },
        ),
        Case::new(
            "graph::drop",
            &["GraphMemory::drop"],
            || {
                let mut stage = captured();
                stage.graphs[0].launched_on(&stage.streams[2]).unwrap();
                stage.graphs[0].keep(stage.buffers.remove(1));
                stage
            },
            |stage| {
                stage.graphs.clear();
                Ok(())
            },
            |stage| {
                stage.pool().trim(HOME).unwrap();
                let stats = stage.pool().device_stats(HOME).unwrap();
                assert_eq!((stats.private_bytes, stats.limbo_bytes), (0, 0), "{stats:?}");
                blocks(1)(stage);
            },
        )
        .quiet(),
        Case::new(
            "pool::close_lane",
            &["Pool::close_lane", "Pool::try_close_lane"],
            || {
                let mut stage = usual();
                // SAFETY: the stage keeps it alive.
                let stream = unsafe {
                    Stream::from_raw(&stage.driver, HOME, stage.streams[0].handle(), None)
                };
                stage.lanes.push(stage.pool().lane(&stream.unwrap()).unwrap());
                stage.alloc(0, 2 * G);
                stage.alloc(0, 3 * G);
                stage.buffers.truncate(1);
                stage
            },
            |stage| {
                stage.pool().close_lane(stage.lanes[0].stream());
                Ok(())
            },
            |stage| {
                assert!(stage.pool().close_lane(stage.lanes[0].stream()), "the stream may go");
                assert!(stage.lanes[0].alloc(1).is_err());
                check_blocks(stage);
            },
        )
        .quiet(),
    ]
}
