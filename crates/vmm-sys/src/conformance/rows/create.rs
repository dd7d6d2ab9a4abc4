//! D-C: physical memory.

use crate::error::ResultCode;
use crate::types::{ChunkProps, DeviceAttribute, DeviceId, GranularityKind, HandleTypes, Location};

use super::super::bench::Bench;
use super::super::check::{granted, near, refused, same, skip};
use super::super::outcome::Outcome;
use super::super::row::{Case, Needs};
use super::super::scratch::WORD;

/// D-C1: sizes that are no multiple of the granularity, and zero.
pub(super) fn d_c1(bench: &Bench) -> Outcome {
    bench.check(|s| {
        for bytes in [0, s.g() / 512, s.g() + s.g() / 2] {
            let answer = s.create(bytes, &s.props());
            refused(format_args!("create {bytes}"), answer, ResultCode::INVALID_VALUE)?;
        }
        Ok(String::new())
    })
}

/// D-C2: a device that is not there; the granularity query does not mind.
pub(super) fn d_c2(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let nowhere = ChunkProps::on_device(DeviceId(99));
        refused("create", s.create(s.g(), &nowhere), ResultCode::INVALID_DEVICE)?;
        let answer = s.driver().granularity(&nowhere, GranularityKind::Minimum);
        granted("granularity of device 99", answer)?;
        Ok(String::new())
    })
}

/// D-C3: more than is free, though not more than there is; nothing is taken by the attempt.
pub(super) fn d_c3(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let held = 512 * s.g();
        s.chunk(held, s.device())?;
        let total = s.driver().device_total_bytes(s.device())? / s.g() * s.g();
        let before = s.free_bytes()?;
        for bytes in [total - held / 2, total + held] {
            let answer = s.chunk(bytes, s.device());
            refused(format_args!("create {bytes} of {before}"), answer, ResultCode::OUT_OF_MEMORY)?;
        }
        near("free after the attempts", s.free_bytes()?, before, held / 16)?;
        Ok(String::new())
    })
}

/// D-C4: memory is taken at create, and by nothing that follows.
pub(super) fn d_c4(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let bytes = 512 * s.g();
        // Page tables are small against it.
        let tolerance = bytes / 32;
        let before = s.free_bytes()?;
        let chunk = s.chunk(bytes, s.device())?;
        let after = before.saturating_sub(bytes);
        near("free after create", s.free_bytes()?, after, tolerance)?;
        let address = s.range(bytes)?;
        s.map(address, bytes, 0, chunk)?;
        near("free after map", s.free_bytes()?, after, tolerance)?;
        s.grant(address, bytes, &[s.device()])?;
        s.fill_words(s.device(), address, s.g() / WORD, 1)?;
        near("free after the first touch", s.free_bytes()?, after, tolerance)?;
        s.unmap(address, bytes)?;
        near("free after unmap", s.free_bytes()?, after, tolerance)?;
        s.release(chunk)?;
        near("free after release", s.free_bytes()?, before, tolerance)?;
        Ok(String::new())
    })
}

/// D-C5: fresh memory is zero, also where it was somebody's before.
pub(super) fn d_c5(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let bytes = 4 * s.g();
        let address = s.range(bytes)?;
        // The same bytes are likely to come back in a later turn; each turn leaves them dirty.
        for turn in 0..4 {
            let chunk = s.chunk(bytes, s.device())?;
            s.map_for(address, bytes, chunk, &[s.device()])?;
            s.expect_fill(format_args!("turn {turn}"), s.device(), address, bytes, 0)?;
            s.fill(s.device(), address, 0xee, bytes)?;
            s.expect_fill("once written", s.device(), address, bytes, 0xee)?;
            s.unmap(address, bytes)?;
            s.release(chunk)?;
        }
        Ok(String::new())
    })
}

/// D-C6: many chunks at once; no limit of the process stands in the way.
pub(super) fn d_c6(bench: &Bench) -> Outcome {
    bench.check(|s| {
        const COUNT: u64 = 20_000;
        let free = s.free_bytes()?;
        if free < (COUNT + 64) * s.g() {
            return skip(format!("{free} bytes are free: too few for {COUNT} chunks"));
        }
        for index in 0..COUNT {
            granted(format_args!("chunk {index}"), s.chunk(s.g(), s.device()))?;
        }
        let expected = free - COUNT * s.g();
        near("free", s.free_bytes()?, expected, COUNT * s.g() / 32)?;
        Ok(format!("{COUNT} chunks"))
    })
}

/// D-C7: the attribute says yes, create says no.
pub(super) fn d_c7(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let attribute = DeviceAttribute::HandleTypeFabricSupported;
        let says = s.driver().device_attribute(s.device(), attribute)?;
        if says != 1 {
            return skip(format!("{attribute:?} is {says}: the row is about a 1 that is not kept"));
        }
        let both =
            HandleTypes::from_bits(HandleTypes::FABRIC.bits() | HandleTypes::POSIX_FD.bits());
        for handle_types in [HandleTypes::FABRIC, both] {
            let answer = s.create(s.g(), &ChunkProps { handle_types, ..s.props() });
            let what = format_args!("create for fabric export ({handle_types:?})");
            refused(what, answer, ResultCode::NOT_PERMITTED)?;
        }
        Ok(String::new())
    })
}

/// The two flags of D-C8.
pub(super) const C8_CASES: &[Case] = &[Case::any("RDMA flag"), Case::any("host NUMA")];

/// D-C8: memory that a NIC may read; memory of the host that the device can use.
pub(super) fn d_c8(bench: &Bench) -> Outcome {
    bench.check(|s| {
        if bench.case() == 0 {
            let attribute = DeviceAttribute::GpuDirectRdmaWithVmmSupported;
            let says = s.driver().device_attribute(s.device(), attribute)?;
            if says != 1 {
                return skip(format!("{attribute:?} is {says}"));
            }
            let props = ChunkProps { rdma: true, ..s.props() };
            let chunk = s.create(s.g(), &props)?;
            same("properties", s.properties(chunk)?, props)?;
        } else {
            Needs::HOST_NUMA.met_by(bench)?;
            let location = Location::HostNuma(0);
            let props = ChunkProps { location, ..s.props() };
            let bytes = s.driver().granularity(&props, GranularityKind::Minimum)?;
            let chunk = s.create(bytes, &props)?;
            same("properties", s.properties(chunk)?, props)?;
            let address = s.range(bytes)?;
            s.map_for(address, bytes, chunk, &[s.device()])?;
            s.fill_words(s.device(), address, bytes / WORD, 3)?;
            s.expect_words("host memory", s.device(), address, bytes / WORD, 3)?;
        }
        Ok(String::new())
    })
}
