//! D-A: access, a property of each mapping.

use crate::error::ResultCode;
use crate::types::{Access, AccessGrant, DeviceId, Location, Transfer};

use super::super::bench::Bench;
use super::super::check::{refused, same};
use super::super::outcome::Outcome;
use super::super::scratch::WORD;

const INVALID: ResultCode = ResultCode::INVALID_VALUE;

/// D-A1: ranges and grants that set access refuses; what was granted before stays.
pub(super) fn d_a1(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (g, device) = (s.g(), s.device());
        let own = [AccessGrant::read_write(device)];
        let address = s.range(8 * g)?;
        refused("nothing mapped", s.set_access(address, 2 * g, &own), INVALID)?;
        for place in [0, 3 * g] {
            let chunk = s.chunk(2 * g, device)?;
            s.map(address + place, 2 * g, 0, chunk)?;
        }
        refused("a hole in the middle", s.set_access(address, 5 * g, &own), INVALID)?;
        refused("half of a mapping", s.set_access(address, g, &own), INVALID)?;
        s.set_access(address, 2 * g, &own)?;
        refused("no grant at all", s.set_access(address, 2 * g, &[]), INVALID)?;
        let nobody = [AccessGrant::read_write(DeviceId(99))];
        refused("device 99", s.set_access(address, 2 * g, &nobody), INVALID)?;
        same("access granted before", s.access_of(address, device)?, Access::ReadWrite)?;
        same("access refused", s.access_of(address + 3 * g, device)?, Access::None)?;
        Ok(String::new())
    })
}

/// D-A2: one call over several mappings that touch.
pub(super) fn d_a2(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (g, device) = (s.g(), s.device());
        let bytes = 4 * g;
        let address = s.range(bytes)?;
        for (place, length) in [(0, g), (g, 2 * g), (3 * g, g)] {
            let chunk = s.chunk(length, device)?;
            s.map(address + place, length, 0, chunk)?;
        }
        s.grant(address, bytes, &[device])?;
        // One kernel and one copy across all three.
        s.fill_words(device, address, bytes / WORD, 40)?;
        s.expect_words("across three chunks", device, address, bytes / WORD, 40)?;
        Ok(String::new())
    })
}

/// D-A3: the host is no grantee of device memory.
pub(super) fn d_a3(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (s.g(), s.device());
        let address = s.buffer(bytes, device, &[device])?;
        let host = [AccessGrant { location: Location::Host, access: Access::ReadWrite }];
        let answer = s.set_access(address, bytes, &host);
        refused("grant to the host", answer, ResultCode::NOT_SUPPORTED)?;
        same("access of the device", s.access_of(address, device)?, Access::ReadWrite)?;
        Ok(String::new())
    })
}

/// D-A4: reads only.
pub(super) fn d_a4(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (s.g(), s.device());
        let words = bytes / WORD;
        let address = s.buffer(bytes, device, &[device])?;
        s.fill_words(device, address, words, 60)?;
        let location = Location::Device(device);
        s.set_access(address, bytes, &[AccessGrant { location, access: Access::Read }])?;
        same("access", s.access_of(address, device)?, Access::Read)?;
        refused("copy in", s.write(device, address, &[1; 64]), INVALID)?;
        s.expect_words("copy out", device, address, words, 60)?;
        s.expect_words_by_kernel("a kernel that reads", device, address, words, 60)?;
        Ok(String::new())
    })
}

/// D-A5: access can be taken back.
pub(super) fn d_a5(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (s.g(), s.device());
        let words = bytes / WORD;
        let address = s.buffer(bytes, device, &[device])?;
        s.fill_words(device, address, words, 70)?;
        let location = Location::Device(device);
        s.set_access(address, bytes, &[AccessGrant { location, access: Access::None }])?;
        same("access", s.access_of(address, device)?, Access::None)?;
        refused("copy out", s.read(device, address, 64), INVALID)?;
        refused("copy in", s.write(device, address, &[1; 64]), INVALID)?;
        s.grant(address, bytes, &[device])?;
        s.expect_words("granted again", device, address, words, 70)?;
        Ok(String::new())
    })
}

/// D-A6: a mapping made again starts with no access; the bytes are those of the chunk.
pub(super) fn d_a6(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device) = (s.g(), s.device());
        let words = bytes / WORD;
        let address = s.range(bytes)?;
        let chunk = s.chunk(bytes, device)?;
        s.map(address, bytes, 0, chunk)?;
        same("access of a first mapping", s.access_of(address, device)?, Access::None)?;
        s.grant(address, bytes, &[device])?;
        s.fill_words(device, address, words, 80)?;
        s.unmap(address, bytes)?;
        s.map(address, bytes, 0, chunk)?;
        same("access of a second mapping", s.access_of(address, device)?, Access::None)?;
        refused("copy out", s.read(device, address, 64), INVALID)?;
        s.grant(address, bytes, &[device])?;
        s.expect_words("granted again", device, address, words, 80)?;
        Ok(String::new())
    })
}

/// D-A7: a grant is all that a peer needs; nothing in this suite ever enables peer access.
pub(super) fn d_a7(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device, peer) = (s.g(), s.device(), s.peer()?);
        let words = bytes / WORD;
        let address = s.buffer(bytes, device, &[device])?;
        same("access of the peer before", s.access_of(address, peer)?, Access::None)?;
        s.grant(address, bytes, &[peer])?;
        same("access of the peer", s.access_of(address, peer)?, Access::ReadWrite)?;
        same("access of the owner", s.access_of(address, device)?, Access::ReadWrite)?;
        s.fill_words(peer, address, words, 90)?;
        s.expect_words("written by the peer", device, address, words, 90)?;
        s.fill_words(device, address, words, 95)?;
        s.expect_words_by_kernel("read by the peer", peer, address, words, 95)?;
        Ok(String::new())
    })
}

/// D-A8: the current context's device decides, and only a peer copy names its own.
pub(super) fn d_a8(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (bytes, device, peer) = (s.g(), s.device(), s.peer()?);
        let words = bytes / WORD;
        let here = s.buffer(bytes, device, &[device])?;
        let there = s.buffer(bytes, peer, &[peer])?;
        s.fill_words(device, here, words, 1000)?;
        refused("copy in from the wrong context", s.write(peer, here, &[1; 64]), INVALID)?;
        let copy = Transfer::DeviceToDevice { dst: there, src: here, bytes };
        refused("copy, reader not granted", s.transfer(peer, copy), INVALID)?;
        refused("copy, writer not granted", s.transfer(device, copy), INVALID)?;
        s.expect_fill("nothing arrived", peer, there, bytes, 0)?;
        let between_owners =
            Transfer::Peer { dst: there, dst_device: peer, src: here, src_device: device, bytes };
        s.transfer(device, between_owners)?;
        s.expect_words("copied between the owners", peer, there, words, 1000)?;
        s.expect_words("the source", device, here, words, 1000)?;
        Ok(String::new())
    })
}
