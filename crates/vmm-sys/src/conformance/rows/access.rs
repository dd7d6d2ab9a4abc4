//! D-A: access, a property of each mapping.

use crate::error::{DriverResult, ResultCode};
use crate::types::{Access, AccessGrant, ChunkProps, DeviceId, HandleTypes, Location, Transfer};

use super::super::bench::Bench;
use super::super::check::{Answers, answer, refused, same};
use super::super::outcome::Outcome;
use super::super::scratch::{Scratch, WORD};

const INVALID: ResultCode = ResultCode::INVALID_VALUE;

/// D-A1: ranges and grants that set access refuses; what was granted before stays.
pub(super) fn d_a1(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (g, device) = (s.g(), s.device());
        let own = [AccessGrant::read_write(device)];
        // Two mappings that touch no other, so that no call reaches a neighbour by accident.
        let (address, granted) = (s.range(8 * g)?, 4 * g);
        let mut answers = Answers::default();
        let mut refusal = |what: &str, place: u64, bytes: u64, grants: &[AccessGrant]| {
            let came = s.set_access(address + place, bytes, grants);
            answers.expect(what, answer(&came), &INVALID.to_string());
        };
        refusal("nothing mapped", 0, 2 * g, &own);
        for place in [0, granted] {
            let chunk = s.chunk(2 * g, device)?;
            s.map(address + place, 2 * g, 0, chunk)?;
        }
        refusal("still nothing mapped", 2 * g, 2 * g, &own);
        refusal("the first half of a mapping", 0, g, &own);
        refusal("the second half of a mapping", g, g, &own);
        s.set_access(address + granted, 2 * g, &own)?;
        refusal("no grant at all", granted, 2 * g, &[]);
        refusal("device 99", granted, 2 * g, &[AccessGrant::read_write(DeviceId(99))]);
        let text = answers.told()?;
        same("access granted before", s.access_of(address + granted, device)?, Access::ReadWrite)?;
        same("access refused", s.access_of(address, device)?, Access::None)?;
        Ok(text)
    })
}

/// D-A9: over a hole between two whole mappings the answer is OK, and only what lies before the hole
/// has access then. D-N10 asks for more shapes.
pub(super) fn d_a9(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (g, device) = (s.g(), s.device());
        let address = s.range(8 * g)?;
        for place in [0, 3 * g] {
            let chunk = s.chunk(2 * g, device)?;
            s.map(address + place, 2 * g, 0, chunk)?;
        }
        let mut answers = Answers::default();
        let came = s.grant(address, 5 * g, &[device]);
        answers.expect("from the start of one mapping to the end of another", answer(&came), "OK");
        let parts = [("before the hole", 0, "ReadWrite"), ("after the hole", 3 * g, "None")];
        for (what, place, expected) in parts {
            let has = format!("{:?}", s.access_of(address + place, device)?);
            answers.expect(what, has, expected);
        }
        answers.told()
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

/// What get access says at an address, in one word.
pub(super) fn says(s: &Scratch<'_>, address: u64, location: Location) -> String {
    let came: DriverResult<Access> = s.driver().get_access(address, location);
    came.map_or_else(|error| error.code().to_string(), |access| format!("{access:?}"))
}

/// D-N6: what get access says, inside mappings and outside.
pub(super) fn d_n6(bench: &Bench) -> Outcome {
    bench.check(|s| {
        let (g, own) = (s.g(), Location::Device(s.device()));
        let (address, invalid) = (s.range(4 * g)?, INVALID.to_string());
        let chunk = s.chunk(2 * g, s.device())?;
        let mut answers = Answers::default();
        answers.expect("reserved, not mapped", says(s, address, own), &invalid);
        s.map(address, 2 * g, 0, chunk)?;
        answers.expect("mapped, nothing granted", says(s, address, own), "None");
        s.grant(address, 2 * g, &[s.device()])?;
        answers.expect("granted, at its start", says(s, address, own), "ReadWrite");
        answers.expect("granted, one byte in", says(s, address + 1, own), "ReadWrite");
        answers.expect("granted, its second half", says(s, address + g, own), "ReadWrite");
        answers.expect("past the mapping", says(s, address + 2 * g, own), &invalid);
        answers.expect("asked for the host", says(s, address, Location::Host), "ReadWrite");
        let node = says(s, address, Location::HostNuma(0));
        answers.expect("asked for host NUMA node 0", node, "None");
        if let Some(peer) = bench.second_device() {
            let theirs = says(s, address, Location::Device(peer));
            answers.expect(format_args!("asked for {peer}"), theirs, "None");
        }
        s.set_access(address, 2 * g, &[AccessGrant { location: own, access: Access::Read }])?;
        answers.expect("read only", says(s, address, own), "Read");
        s.unmap(address, 2 * g)?;
        answers.expect("unmapped", says(s, address, own), &invalid);
        s.address_free(address, 4 * g)?;
        answers.expect("freed", says(s, address, own), &invalid);
        answers.told()
    })
}

/// D-N12: whom get access answers for when it is asked for the host.
pub(super) fn d_n12(bench: &Bench) -> Outcome {
    bench.observe(|s| {
        let (g, device) = (s.g(), s.device());
        let mut answers = Answers::default();
        let mut ask = |what: &str, address: u64| {
            let node = |node| says(s, address, Location::HostNuma(node));
            let (host, zero, one) = (says(s, address, Location::Host), node(0), node(1));
            answers.note(what, format_args!("host {host}, node 0 {zero}, node 1 {one}"));
        };
        let address = s.range(g)?;
        let chunk = s.chunk(g, device)?;
        s.map(address, g, 0, chunk)?;
        let grant =
            |location, access| s.set_access(address, g, &[AccessGrant { location, access }]);
        let own = Location::Device(device);
        ask("own memory, nothing granted", address);
        grant(own, Access::Read)?;
        ask("own memory, read only", address);
        grant(own, Access::ReadWrite)?;
        ask("own memory, read and write", address);
        grant(own, Access::None)?;
        ask("own memory, taken back", address);
        if let Some(peer) = bench.second_device() {
            grant(Location::Device(peer), Access::ReadWrite)?;
            ask("own memory, granted to the other device alone", address);
            ask("the other's memory, granted to it alone", s.buffer(g, peer, &[peer])?);
            ask("the other's memory, granted to this device alone", s.buffer(g, peer, &[device])?);
        }
        ask("cuMemAlloc", s.mem_alloc(device, g)?);
        host_memory(s, &mut answers)?;
        answers.told()
    })
}

/// The same of host NUMA memory, where there is some.
fn host_memory(s: &Scratch<'_>, answers: &mut Answers) -> DriverResult<()> {
    let g = s.g();
    let location = Location::HostNuma(0);
    let chunk = s.create(g, &ChunkProps { location, handle_types: HandleTypes::NONE, rdma: false });
    let Ok(chunk) = chunk else {
        answers.note("host NUMA memory", answer(&chunk));
        return Ok(());
    };
    let address = s.range(g)?;
    s.map(address, g, 0, chunk)?;
    let own = Location::Device(s.device());
    for (what, grantee) in [
        ("nothing", None),
        ("this device", Some(own)),
        ("node 0", Some(location)),
        ("the host", Some(Location::Host)),
    ] {
        let came = grantee.map_or("no call".to_owned(), |location| {
            let grants = [AccessGrant { location, access: Access::ReadWrite }];
            answer(&s.set_access(address, g, &grants))
        });
        let (device, node) = (says(s, address, own), says(s, address, location));
        let host = says(s, address, Location::Host);
        let then = format_args!("{came}; then device {device}, node 0 {node}, host {host}");
        answers.note(format_args!("host NUMA memory, granted to {what}"), then);
    }
    Ok(())
}
