//! Addresses: how many are reserved, and what happens where there are few. Ids F-… are those of the
//! reports that the stories come from.
use crate::common::{HOME, MIB, Rig};
use vmm_pool::{Buffer, Error};
use vmm_sys::sim::{FaultPlan, Sim};
use vmm_sys::{Call, ResultCode};

const GIB: u64 = 1 << 30;

/// Writes its own number at both ends of each, and finds it there.
fn check_ends(buffers: &[Buffer]) {
    for (index, buffer) in buffers.iter().enumerate() {
        for offset in [0, buffer.bytes() - 4] {
            buffer.write(offset, &[index as u8; 4]).unwrap();
        }
    }
    for (index, buffer) in buffers.iter().enumerate() {
        for offset in [0, buffer.bytes() - 4] {
            let mut found = [0xFF; 4];
            buffer.read(offset, &mut found).unwrap();
            assert_eq!(found, [index as u8; 4]);
        }
    }
}

#[test]
fn f_h4_where_long_reservations_are_refused_shorter_ones_serve() {
    for most in [16 * GIB, 4 * GIB, GIB] {
        let rig = Rig::on(Sim::builder().max_reservation_bytes(most).build(), |b| b);
        // More than one reservation has, in all.
        let count = most / (700 * MIB) + 4;
        let buffers: Vec<_> = (0..count).map(|_| rig.lane.alloc(700 * MIB).unwrap()).collect();
        check_ends(&buffers);
        assert!(rig.stats().reserved_bytes > most, "a further range");
        // What no range can hold is an error that says which call, and how much it asked for.
        let error = rig.lane.alloc(2 * most).unwrap_err();
        let Error::OutOfAddresses { bytes, .. } = &error else { panic!("{error}") };
        let text = error.to_string();
        assert!(*bytes >= 2 * most && text.contains(&bytes.to_string()), "{text}");
        assert!(text.contains("cuMemAddressReserve") && text.contains("address range"), "{text}");
        assert!(!error.is_out_of_memory(), "memory is not what is short");
        let elastic = rig.pool.elastic(HOME).capacity_bytes(2 * most).build().unwrap_err();
        assert!(matches!(elastic, Error::OutOfAddresses { .. }), "{elastic}");
        let elastic = rig.pool.elastic(HOME).capacity_bytes(most).build().unwrap();
        elastic.grow_to(100 * MIB).unwrap();
        drop((buffers, elastic));
        rig.end();
    }
}

#[test]
fn f_h4_what_the_device_has_can_be_had_whatever_is_reserved_first() {
    for most in [u64::MAX, 16 * GIB] {
        let sim = Sim::builder().device_bytes(256 * GIB).max_reservation_bytes(most).build();
        let rig = Rig::on(sim, |b| b);
        let buffers: Vec<_> = (0..200).map(|_| rig.lane.alloc(GIB).unwrap()).collect();
        check_ends(&buffers);
        assert!(rig.stats().held_bytes >= 200 * GIB);
        drop(buffers);
        rig.end();
    }
    let rig = Rig::on(Sim::builder().device_bytes(256 * GIB).build(), |b| b);
    check_ends(&[rig.lane.alloc(200 * GIB).unwrap()]);
    rig.end();
}

#[test]
fn f_h4_where_nothing_can_be_reserved_the_error_comes_at_once() {
    let rig = Rig::new(|b| b);
    let refuse = FaultPlan::fail(ResultCode::OUT_OF_MEMORY).on(Call::MemAddressReserve);
    let refusal = rig.sim.inject(refuse);
    let calls = rig.calls(|| {
        let error = rig.lane.alloc(3 * MIB).unwrap_err();
        assert!(matches!(error, Error::OutOfAddresses { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("4194304 bytes") && text.contains("cuMemAddressReserve"), "{text}");
    });
    // Halved from a quarter of the device down to the need, and nothing else tried.
    assert!(calls.of(Call::MemAddressReserve) <= 20, "{calls}");
    assert_eq!(calls.total(), calls.of(Call::MemAddressReserve), "{calls}");
    rig.sim.clear_fault(refusal);
    drop(rig.lane.alloc(3 * MIB).unwrap());
    rig.end();
}

/// An answer at another alignment than was asked for is noticed, given back, and named.
#[test]
fn f_h4_an_alignment_that_is_not_kept_is_noticed() {
    let rig = Rig::on(Sim::builder().honour_alignment(false).build(), |b| b);
    // What comes next lies a granule beside every larger alignment.
    let odd = rig.driver.address_reserve(2 * MIB, 0, 0).unwrap();
    let error = rig.lane.alloc(3 * MIB).unwrap_err();
    let Error::Driver(cause) = &error else { panic!("{error}") };
    assert_eq!((cause.call(), cause.code()), (Call::MemAddressReserve, ResultCode::NOT_SUPPORTED));
    assert!(error.to_string().contains("aligned to 33554432, got 0x"), "{error}");
    let elastic = rig.pool.elastic(HOME).capacity_bytes(64 * MIB).build().unwrap_err();
    assert!(elastic.to_string().contains("aligned to 33554432, got 0x"), "{elastic}");
    assert_eq!(rig.sim.ledger_summary().ranges, 1, "every wrong answer was given back");
    rig.driver.address_free(odd, 2 * MIB).unwrap();
    rig.end();
}
