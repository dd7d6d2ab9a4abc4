//! Lenders: who is asked, what they give, what they say when they do not, and that budgets hold.
use crate::common::elastic::{G, four, machine, on};
use vmm_pool::{ElasticBuffer, ElasticError, Error, Growth, LenderAnswer, Place, Pool, Refusal};
use vmm_sys::DeviceId;
use vmm_sys::sim::{Link, SimBuilder};

const HOST: Place = Place::HostNuma(0);

fn nobody_lends(error: Error) -> (u64, Error, Vec<LenderAnswer>) {
    assert!(error.is_out_of_memory(), "{error}");
    match error {
        Error::Elastic(ElasticError::NobodyLends { bytes, home, answers, .. }) => {
            (bytes, *home, answers)
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_lender_that_is_exhausted_says_which_by_how_much_and_why() {
    let machine = four(|pool| {
        let pool =
            pool.lend(DeviceId(1), 64 * G).lend(DeviceId(2), 3 * G).lend(DeviceId(3), 64 * G);
        pool.limit_bytes(5 * G)
    });
    let buffer = machine.buffer(0, 64 * G);
    let before = machine.picture(&buffer);
    let growth = Growth::to(20 * G).borrow_from([on(1), on(2), on(1), on(0)]);
    let error = buffer.grow(growth).unwrap_err();
    let text = error.to_string();
    let (bytes, _, answers) = nobody_lends(error);
    assert_eq!(bytes, 16 * G, "home gives 4");
    let gives: Vec<_> = answers.iter().map(|it| (it.place, it.gives_bytes)).collect();
    // One chunk of device 1 is behind its anchor.
    assert_eq!(gives, [(on(2), 3 * G), (on(1), 4 * G)]);
    assert!(matches!(
        answers[0].refusal,
        Refusal::Budget { budget_bytes, booked_bytes } if (budget_bytes, booked_bytes) == (3 * G, 3 * G)
    ));
    assert!(matches!(
        answers[1].refusal,
        Refusal::Limit { limit_bytes, held_bytes } if (limit_bytes, held_bytes) == (5 * G, 5 * G)
    ));
    for part in
        ["33554432 bytes", "out of memory on device 0", "device 2 gives 6291456", "device 1"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(machine.picture(&buffer), before);
    drop(buffer);
    machine.end();
}

#[test]
fn a_lender_whose_memory_cannot_be_used_is_passed_over() {
    let no_link = |sim: SimBuilder| sim.device_bytes_of(0, 2 * G).link(0, 1, Link::None);
    let machine = machine(3, no_link, |pool| pool.lend(DeviceId(1), 8 * G).lend(DeviceId(2), G));
    let buffer = machine.buffer(0, 64 * G);
    let growth = || Growth::to(3 * G).borrow_from([DeviceId(1), DeviceId(2)]);
    assert_eq!(buffer.grow(growth()).unwrap().borrowed, [(on(2), G)]);
    let (_, _, answers) =
        nobody_lends(buffer.grow(Growth::to(4 * G).borrow_from([DeviceId(1)])).unwrap_err());
    let Refusal::Unusable(why) = &answers[0].refusal else { panic!("{answers:?}") };
    assert!(matches!(**why, Error::Elastic(ElasticError::NoPeer { .. })), "{why}");
    drop(buffer);
    machine.end();
}

#[test]
fn a_lender_gives_what_lies_ready_and_is_not_emptied_for_it() {
    let small = |sim: SimBuilder| sim.device_bytes_of(0, G).device_bytes_of(1, 4 * G);
    let machine = machine(2, small, |pool| pool.lend(DeviceId(1), 64 * G));
    let stream = machine.stream(1);
    let lane = machine.pool.lane(&stream).unwrap();
    drop(lane.alloc(2 * G).unwrap());
    let idle = machine.stats(1).idle_bytes;
    assert_eq!(idle, 2 * G);
    let buffer = machine.buffer(0, 64 * G);
    // One chunk is left beside the lane's and the anchor's.
    let (_, _, answers) =
        nobody_lends(buffer.grow(Growth::to(3 * G).borrow_from_any()).unwrap_err());
    assert_eq!(answers[0].gives_bytes, G);
    assert!(matches!(answers[0].refusal, Refusal::Full { .. }), "{answers:?}");
    assert_eq!(machine.stats(1).idle_bytes, idle);
    assert_eq!(buffer.grow(Growth::to(2 * G).borrow_from_any()).unwrap().borrowed, [(on(1), G)]);
    // What somebody left and nobody uses any more is ready.
    buffer.shrink_to(G).unwrap();
    assert_eq!(buffer.grow(Growth::to(2 * G).borrow_from_any()).unwrap().borrowed, [(on(1), G)]);
    drop((buffer, lane, stream));
    machine.end();
}

#[test]
fn a_pool_refuses_lenders_that_it_does_not_know() {
    let machine = four(|pool| pool);
    for place in [on(5), Place::HostNuma(1)] {
        let builder = Pool::builder(machine.driver.clone()).lend(place, G);
        let calls = machine.driver.ledger().snapshot();
        let error = builder.build().unwrap_err();
        assert!(matches!(error, Error::Elastic(ElasticError::UnknownPlace { .. })), "{error}");
        assert_eq!(machine.driver.ledger().snapshot().since(&calls).total(), 0);
    }
    machine.end();
}

#[test]
fn borrowers_together_never_pass_a_budget() {
    let machine = machine(
        3,
        |sim| sim.device_bytes_of(0, 2 * G).device_bytes_of(1, 2 * G),
        |pool| pool.lend(DeviceId(2), 5 * G),
    );
    let buffers: Vec<ElasticBuffer> = (0..4).map(|at| machine.buffer(at % 2, 64 * G)).collect();
    std::thread::scope(|scope| {
        for buffer in &buffers {
            scope.spawn(|| {
                for round in 0..20 {
                    let growth = Growth::to((1 + round % 4) * G).borrow_from([DeviceId(2)]);
                    if let Err(error) = buffer.grow(growth) {
                        assert!(error.is_out_of_memory(), "{error}");
                    }
                    machine.pool.verify().unwrap();
                    buffer.shrink_to(0).unwrap();
                }
            });
        }
    });
    assert_eq!(machine.stats(2).lending_booked_bytes, 0);
    drop(buffers);
    machine.end();
}

#[test]
fn nobody_borrows_who_does_not_say_so_and_nobody_lends_who_was_not_told() {
    let machine = four(|pool| pool.lend(DeviceId(2), 8 * G).host_memory(0, 64 * G, 0));
    let buffer = machine.buffer(0, 64 * G);
    let before = machine.picture(&buffer);
    let error = buffer.grow_to(5 * G).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory(_)), "{error}");
    assert_eq!(machine.picture(&buffer), before);
    // A device that was named but lends nothing says so; one that lends is not asked unless named.
    let (bytes, home, answers) =
        nobody_lends(buffer.grow(Growth::to(5 * G).borrow_from([DeviceId(1)])).unwrap_err());
    assert!(matches!(home, Error::OutOfMemory(_)), "{home}");
    assert_eq!((bytes, answers.len(), answers[0].place), (G, 1, on(1)));
    assert!(matches!(answers[0].refusal, Refusal::Budget { budget_bytes: 0, .. }), "{answers:?}");
    // The host lends to who names it, and not to who names nobody.
    let grown = buffer.grow(Growth::to(5 * G).borrow_from([HOST])).unwrap();
    assert_eq!(grown.borrowed, [(HOST, G)]);
    buffer.shrink_to(4 * G).unwrap();
    let grown = buffer.grow(Growth::to(12 * G).borrow_from_any()).unwrap();
    assert_eq!(grown.borrowed, [(on(2), 8 * G)]);
    let (bytes, _, answers) =
        nobody_lends(buffer.grow(Growth::to(14 * G).borrow_from_any()).unwrap_err());
    let asked: Vec<Place> = answers.iter().map(|answer| answer.place).collect();
    assert_eq!((bytes, asked), (2 * G, vec![on(2), on(3), on(1)]));
    drop(buffer);
    machine.end();
}
