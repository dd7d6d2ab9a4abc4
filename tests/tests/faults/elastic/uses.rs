//! Uses, access, copies, sharing and exports.

use vmm_pool::{Cause, Phase};
use vmm_sys::sim::SimBuilder;
use vmm_sys::{Access, DeviceId};

use super::{borrower, check, check_slots, first, four, shared};
use crate::engine::{Case, done};
use crate::stage::{G, HOME, NEXT, SOON, Stage, stage, usual};

const THIRD: DeviceId = DeviceId(2);

fn exportable() -> Stage {
    let stage = usual().with_built(4, |builder| builder.exportable(true));
    first(&stage).commit_from(NEXT.into(), 5 * G..6 * G).unwrap();
    stage.mark_elastic();
    stage
}

/// Chunks of three devices, one of them at two addresses.
fn scattered() -> Stage {
    let sim = |sim: SimBuilder| sim.devices(3);
    let stage = stage(sim, |pool| pool.device(THIRD)).with_elastic(3);
    first(&stage).commit_from(THIRD.into(), 8 * G..10 * G).unwrap();
    first(&stage).commit_from(NEXT.into(), 12 * G..13 * G).unwrap();
    stage.mark_elastic();
    first(&stage).share(0..G, 6 * G).unwrap();
    stage
}

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new(
            "elastic::use_on",
            &["ElasticBuffer::use_on", "Use::drop"],
            four,
            |stage| {
                drop(first(stage).use_on(&stage.streams[1])?);
                drop(first(stage).use_on(&stage.streams[1])?);
                Ok(())
            },
            |stage| check(stage, 4),
        ),
        Case::new(
            "elastic::use_on_after_a_return",
            &["ElasticBuffer::use_on"],
            || {
                // Memory that came back before its users were done: later ones are ordered behind.
                let stage = four();
                let hold = stage.sim.hold(HOME, stage.streams[0].handle()).unwrap();
                drop(first(&stage).use_on(&stage.streams[0]).unwrap());
                first(&stage).shrink_to(2 * G).unwrap();
                first(&stage).grow_to(4 * G).unwrap();
                stage.sim.release_hold(hold);
                stage
            },
            |stage| {
                drop(first(stage).use_on(&stage.streams[1])?);
                Ok(())
            },
            |stage| check(stage, 4),
        ),
        Case::new(
            "elastic::grant",
            &["ElasticBuffer::grant"],
            scattered,
            |stage| done(first(stage).grant(NEXT, Access::Read)),
            |stage| assert_eq!(first(stage).access(NEXT), Access::Read),
        ),
        Case::new(
            "elastic::grant_more",
            &["ElasticBuffer::grant"],
            || {
                let stage = scattered();
                first(&stage).grant(NEXT, Access::Read).unwrap();
                stage
            },
            |stage| done(first(stage).grant(NEXT, Access::ReadWrite)),
            |stage| assert_eq!(first(stage).access(NEXT), Access::ReadWrite),
        ),
        Case::new(
            "elastic::revoke",
            &["ElasticBuffer::revoke"],
            || {
                let stage = scattered();
                first(&stage).grant(NEXT, Access::ReadWrite).unwrap();
                stage
            },
            |stage| done(first(stage).revoke(NEXT)),
            |stage| assert_eq!(first(stage).access(NEXT), Access::None),
        ),
        Case::new(
            "elastic::bytes",
            &["ElasticBuffer::write", "ElasticBuffer::read", "ElasticBuffer::read_by"],
            || {
                let stage = borrower();
                first(&stage).grant(NEXT, Access::ReadWrite).unwrap();
                stage
            },
            |stage| {
                let mark = [(first(stage).address() / G) as u8];
                first(stage).write(0, &mark)?;
                let mut found = [0];
                first(stage).read(0, &mut found)?;
                assert_eq!(found, mark);
                first(stage).read_by(NEXT, 0, &mut found)?;
                assert_eq!(found, mark);
                Ok(())
            },
            |stage| check(stage, 6),
        ),
        Case::new(
            "elastic::copy_on",
            &["ElasticBuffer::copy_on", "ElasticBuffer::copies_on"],
            four,
            |stage| {
                // Over its own mark with the same bytes, so that a copy that was refused half way shows
                // nothing: each of them is enqueued or not.
                first(stage).copy_on(&stage.streams[0], 64..128, G + 64)?;
                let copies = [(64..128, 2 * G + 64), (64..128, 3 * G + 64)];
                first(stage).copies_on(&stage.streams[1], copies)?;
                Ok(())
            },
            |stage| check(stage, 4),
        ),
        Case::new(
            "elastic::share",
            &["ElasticBuffer::share"],
            || {
                let stage = shared();
                first(&stage).grant(NEXT, Access::Read).unwrap();
                stage
            },
            |stage| done(first(stage).share(0..3 * G, 10 * G)),
            |stage| {
                check(stage, 9);
                check_slots(stage, [(6, 0), (7, 1), (10, 0), (11, 1), (12, 2)]);
            },
        ),
        Case::new(
            "elastic::unshare",
            &["ElasticBuffer::unshare", "ElasticBuffer::unshare_all"],
            || {
                let stage = shared();
                drop(first(&stage).use_on(&stage.streams[0]).unwrap());
                stage
            },
            |stage| done(first(stage).unshare(0..8 * G, SOON)),
            |stage| {
                check(stage, 6);
                check_slots(stage, [(6, 0), (7, 1)]);
                assert!(first(stage).pieces().iter().all(|piece| !piece.shared));
            },
        ),
        Case::new(
            "elastic::export_pieces",
            &["ElasticBuffer::export_pieces", "ElasticBuffer::export_pieces_in"],
            exportable,
            |stage| {
                assert_eq!(first(stage).export_pieces()?.len(), 5);
                assert_eq!(first(stage).export_pieces_in(G..3 * G)?.len(), 2);
                Ok(())
            },
            |stage| check(stage, 5),
        ),
        Case::new(
            "elastic::dma_bufs",
            &["ElasticBuffer::dma_bufs"],
            exportable,
            |stage| {
                assert_eq!(first(stage).dma_bufs()?.len(), 2);
                Ok(())
            },
            |stage| check(stage, 5),
        ),
        Case::new(
            "elastic::grow_with_hooks",
            &["ElasticBuffer::on_backing_change"],
            || {
                let mut stage = four();
                let hook = first(&stage).on_backing_change(|change| {
                    let told = matches!(change.phase, Phase::Before | Phase::After | Phase::Failed);
                    assert!(told && change.cause == Cause::Commit);
                });
                stage.kept.push(Box::new(hook));
                stage
            },
            |stage| done(first(stage).grow_to(6 * G)),
            |stage| check(stage, 6),
        ),
    ]
}
