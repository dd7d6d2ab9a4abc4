//! Sizes, alignments, and sums that overflow.

use vmm_pool::{Error, Request};
use vmm_sys::DeviceId;

use super::{G, MIB, builder, clean, lane, machine, pool, sound};
use crate::machine::{DriverChoice, Machine, MachineSpec, Skip};

pub(super) fn f_a1_sizes_near_the_top_are_refused(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = pool(&machine);
    let lane = lane(&machine, &pool);
    let elastic = pool.elastic(DeviceId(0)).capacity_bytes(64 * MIB);
    let elastic = elastic.build().expect("an elastic buffer is made");
    let max = u64::MAX;
    for bytes in
        [max, max - 1, max - 3, max - 255, max - 256, max - (G - 1), 1 << 63, (1 << 63) - 1]
    {
        let (calls, before) = (machine.driver().ledger().snapshot(), sound(&pool));
        match lane.alloc(bytes) {
            Err(Error::TooLarge { bytes: named, .. }) => assert_eq!(named, bytes),
            other => panic!("{bytes} bytes: {other:?}"),
        }
        // By every other door.
        let raw = lane.alloc_raw(bytes).expect_err("it cannot be served by address either");
        assert!(matches!(raw, Error::TooLarge { .. }), "{bytes} bytes: {raw}");
        let aligned = Request::new(bytes).align(32 * MIB).no_wait();
        let aligned = lane.alloc_with(&aligned).expect_err("no more with an alignment");
        assert!(matches!(aligned, Error::TooLarge { .. }), "{bytes} bytes: {aligned}");
        let grown = elastic.grow_to(bytes).expect_err("beyond the capacity");
        assert!(matches!(grown, Error::Elastic(_)), "{bytes} bytes: {grown}");
        for range in [0..bytes, bytes - 1..bytes, bytes - G..bytes] {
            let grown = elastic.commit(range.clone()).expect_err("beyond the capacity");
            assert!(matches!(grown, Error::Elastic(_)), "{range:?}: {grown}");
        }
        let capacity = pool.elastic(DeviceId(0)).capacity_bytes(bytes).build();
        let capacity = capacity.expect_err("more than all addresses");
        assert!(matches!(capacity, Error::BadSetting { .. }), "{bytes} bytes: {capacity}");
        let calls = machine.driver().ledger().snapshot().since(&calls);
        assert_eq!(calls.total(), 0, "{bytes} bytes: {calls}");
        assert_eq!(sound(&pool), before);
    }
    drop(lane.alloc(256).expect("an ordinary request is served after all"));
    drop((elastic, lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn f_a4_every_size_is_served_on_every_granularity(
    choice: DriverChoice,
) -> Result<(), Skip> {
    for granularity_bytes in [4096, 64 << 10, G, 512 * MIB] {
        let spec = MachineSpec { granularity_bytes, ..MachineSpec::default() };
        let machine = match (Machine::new(choice, spec), granularity_bytes) {
            (Ok(machine), _) => machine,
            (Err(skip), G) => return Err(skip),
            // A GPU has one granularity: it is the one that is tried there.
            (Err(_), _) => continue,
        };
        let pool = pool(&machine);
        let lane = lane(&machine, &pool);
        let mut live = 0;
        let mut buffers = Vec::new();
        let g = granularity_bytes;
        // The simulated device refuses what is no multiple of its granularity.
        for bytes in [1, 128, 6912, g - 1, g, g + 1] {
            let buffer = lane.alloc(bytes).unwrap_or_else(|error| panic!("{bytes}: {error}"));
            buffer.write(bytes - 1, &[7]).expect("the last byte is there");
            live += bytes;
            buffers.push(buffer);
            let stats = sound(&pool);
            assert_eq!(stats.live_bytes, live);
            assert!(stats.rounding_bytes > 0 && stats.held_bytes.is_multiple_of(g), "{stats:?}");
            assert!(stats.reserved_bytes.is_multiple_of(g), "{stats:?}");
        }
        drop(buffers);
        drop((lane, pool));
        clean(&machine);
    }
    Ok(())
}

pub(super) fn f_a5_addresses_are_aligned_and_bad_alignments_refused(
    choice: DriverChoice,
) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = pool(&machine);
    let lanes = [lane(&machine, &pool), lane(&machine, &pool)];
    let mut buffers = Vec::new();
    let asked = [(32, 32), (1, 1), (100, 512), (100, 4096), (300, G), (7, 256), (5000, 32 * MIB)];
    for round in 0..6 {
        for (bytes, align) in asked {
            for lane in &lanes {
                let odd = lane.alloc(1 + 777 * round).expect("an odd size is served");
                let request = Request::new(bytes).align(align);
                let buffer = lane.alloc_with(&request).expect("an aligned request is served");
                assert!(buffer.address().is_multiple_of(align.max(256)), "{buffer:?}, {align}");
                assert_eq!(buffer.bytes(), bytes);
                buffers.extend([odd, buffer]);
            }
        }
        // Holes of all kinds for the next round.
        let mut index = 0;
        buffers.retain(|_| {
            index += 1;
            index % 3 != 0
        });
    }
    let mut places: Vec<_> = buffers.iter().map(|b| (b.address(), b.bytes())).collect();
    places.sort_unstable();
    assert!(places.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "they overlap");
    for align in [0, 3, 768, 1 << 63, u64::MAX] {
        let (calls, before) = (machine.driver().ledger().snapshot(), sound(&pool));
        match lanes[0].alloc_with(&Request::new(100).align(align)) {
            Err(Error::BadAlignment { align_bytes, .. }) => assert_eq!(align_bytes, align),
            other => panic!("alignment {align}: {other:?}"),
        }
        assert_eq!(machine.driver().ledger().snapshot().since(&calls).total(), 0);
        assert_eq!(sound(&pool), before);
    }
    drop((buffers, lanes, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn f_a6_zero_bytes_from_many_threads(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = pool(&machine);
    let lane = lane(&machine, &pool);
    let (calls, before) = (machine.driver().ledger().snapshot(), sound(&pool));
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                for _ in 0..10_000 {
                    let buffer = lane.alloc(0).expect("zero bytes are served");
                    assert!(buffer.is_empty() && buffer.address() == 0);
                }
            });
        }
    });
    assert_eq!(machine.driver().ledger().snapshot().since(&calls).total(), 0);
    assert_eq!(sound(&pool), before);
    let counters = [before.held_bytes, before.live_bytes, before.idle_bytes, before.buffers];
    assert_eq!(counters, [0; 4], "{before:?}");
    // Real sizes beside them change nothing of that.
    std::thread::scope(|scope| {
        for thread in 0..16 {
            let lane = &lane;
            scope.spawn(move || {
                for round in 0..200 {
                    let real = lane.alloc(1 + thread * round).expect("a real size is served");
                    let empty = lane.alloc(0).expect("zero bytes are served");
                    assert!(empty.is_empty() && empty.address() == 0 && real.address() != 0);
                }
            });
        }
    });
    let after = sound(&pool);
    assert_eq!((after.buffers, after.live_bytes, after.rounding_bytes), (0, 0, 0), "{after:?}");
    let real = lane.alloc(1000).expect("a real size is served");
    let empty = lane.alloc(0).expect("zero bytes are served");
    assert_eq!((sound(&pool).buffers, sound(&pool).live_bytes), (1, 1000));
    drop((real, empty, lane, pool));
    clean(&machine);
    Ok(())
}

pub(super) fn sums_that_would_overflow_are_refused(choice: DriverChoice) -> Result<(), Skip> {
    let machine = machine(choice)?;
    let pool = builder(&machine).limit_bytes(8 * G).build().expect("a pool is built");
    let lane = lane(&machine, &pool);
    let buffer = lane.alloc(1000).expect("a small request is served");
    let mut two = [0, 0];
    for offset in [u64::MAX, u64::MAX - 1, 999, 1000, 1 << 63] {
        let refused = |result| matches!(result, Err(Error::OutOfBounds { .. }));
        assert!(refused(buffer.write(offset, &[1, 2])), "{offset}");
        assert!(refused(buffer.read(offset, &mut two)), "{offset}");
    }
    buffer.write(1000, &[]).expect("nothing fits at the end");
    buffer.write(998, &[1, 2]).expect("the last bytes are there");
    // More than could ever be, of the limit's memory.
    let error = pool.prefill(DeviceId(0), u64::MAX).expect_err("no device is so large");
    assert!(error.is_out_of_memory(), "{error}");
    sound(&pool);
    let limit = builder(&machine).limit_bytes(u64::MAX).build().expect("no limit is one too");
    assert!(limit.verify().is_ok());
    drop((buffer, lane, pool, limit));
    clean(&machine);
    Ok(())
}

pub(super) fn the_largest_request_fits_no_machine_and_harms_none(
    choice: DriverChoice,
) -> Result<(), Skip> {
    for granularity_bytes in [4096, G] {
        let spec = MachineSpec {
            granularity_bytes,
            device_bytes: Some(256 * MIB),
            ..MachineSpec::default()
        };
        let machine = Machine::new(choice, spec)?;
        let pool = pool(&machine);
        let lane = lane(&machine, &pool);
        let keep = lane.alloc(MIB).expect("a small request is served");
        for bytes in [1 << 33, (1 << 37) - 1, 1 << 44, 1 << 46] {
            match lane.alloc(bytes) {
                Err(Error::TooLarge { .. } | Error::OutOfAddresses { .. }) => {}
                Err(error) if error.is_out_of_memory() => {}
                other => panic!("{bytes} bytes of {granularity_bytes}: {other:?}"),
            }
            assert_eq!(sound(&pool).live_bytes, MIB);
        }
        let again = lane.alloc(100 * MIB).expect("an ordinary request is served after all");
        drop((keep, again, lane, pool));
        clean(&machine);
    }
    Ok(())
}
