//! Ranges, chunks, mappings, access: rows R, C, M, A, U, H, F and P.

use super::*;
use crate::error::ResultCode as Code;

fn props(device: DeviceId) -> ChunkProps {
    ChunkProps::on_device(device)
}

fn free_bytes(sim: &Sim) -> u64 {
    sim.mem_info(D0).unwrap().free_bytes
}

#[test]
fn reserve_answers_as_measured() {
    let sim = sim();
    for bytes in [0, 4 << 10, 64 << 10, 3 << 20] {
        assert_eq!(code(sim.address_reserve(bytes, 0, 0)), Code::INVALID_VALUE, "{bytes}");
    }
    assert_eq!(code(sim.address_reserve(G, 3, 0)), Code::INVALID_VALUE);
    let aligned = sim.address_reserve(G, 1 << 30, 0).unwrap();
    assert!(aligned.is_multiple_of(1 << 30));
    assert_eq!(sim.address_reserve(G, 0, aligned + G).unwrap(), aligned + G);
    let elsewhere = sim.address_reserve(G, 0, aligned).unwrap();
    assert_ne!(elsewhere, aligned);
    for crooked in [0x1234, aligned + 4096, aligned + G / 2] {
        assert_eq!(code(sim.address_reserve(G, 0, crooked)), Code::INVALID_VALUE, "{crooked:#x}");
    }
    assert!(sim.address_reserve(G, 0, G).is_ok(), "an address that no range can have");
    assert!(sim.address_reserve(16 << 40, 0, 0).is_ok());
}

#[test]
fn reserve_31_times_4_tib_then_out_of_addresses() {
    let sim = sim();
    for round in 0..31 {
        assert!(sim.address_reserve(4 << 40, 0, 0).is_ok(), "round {round}");
    }
    let error = sim.address_reserve(4 << 40, 0, 0).unwrap_err();
    assert!(error.is_out_of_addresses(), "{error}");
}

#[test]
fn create_answers_as_measured() {
    let sim = sim();
    for bytes in [0, 4 << 10, 3 << 20] {
        assert_eq!(code(sim.create(bytes, &props(D0))), Code::INVALID_VALUE, "{bytes}");
    }
    let nowhere = props(DeviceId(99));
    assert_eq!(code(sim.create(G, &nowhere)), Code::INVALID_DEVICE);
    assert_eq!(sim.granularity(&nowhere, GranularityKind::Minimum).unwrap(), G);
    assert!(sim.create(2 << 30, &props(D0)).unwrap_err().is_out_of_memory());

    let before = free_bytes(&sim);
    let chunk = sim.create(1 << 29, &props(D0)).unwrap();
    assert_eq!(before - free_bytes(&sim), 1 << 29);
    sim.t_release(chunk).unwrap();
    assert_eq!(free_bytes(&sim), before);

    let fabric = ChunkProps { handle_types: HandleTypes::FABRIC, ..props(D0) };
    let says = sim.device_attribute(D0, DeviceAttribute::HandleTypeFabricSupported).unwrap();
    assert_eq!((says, code(sim.create(G, &fabric))), (1, Code::NOT_PERMITTED));
    assert!(sim.create(G, &ChunkProps { rdma: true, ..props(D0) }).is_ok());
    let host = ChunkProps { location: Location::HostNuma(0), ..props(D0) };
    assert!(sim.create(G, &host).is_ok());
    let no_node = ChunkProps { location: Location::HostNuma(7), ..props(D0) };
    assert_eq!(code(sim.create(G, &no_node)), Code::INVALID_VALUE);
}

#[test]
fn twenty_thousand_chunks_fit() {
    let sim = Sim::builder().build();
    let exportable = ChunkProps { handle_types: HandleTypes::POSIX_FD, ..props(D0) };
    let chunks: Vec<_> = (0..20_000).map(|_| sim.create(G, &exportable).unwrap()).collect();
    assert_eq!(sim.ledger_summary().handles, 20_000);
    for chunk in chunks {
        sim.t_release(chunk).unwrap();
    }
    assert_eq!(sim.check_clean(), Ok(()));
}

#[test]
fn contents_are_zero_after_create_also_of_recycled_bytes() {
    let sim = Sim::builder().device_bytes(G).build();
    for round in 0..3_u8 {
        let (address, chunk) = sim.t_mapped(D0, G);
        assert_eq!(sim.t_download(D0, address + G - 64, 64).unwrap(), [0; 64]);
        sim.t_upload(D0, address + G - 64, &[round + 1; 64]).unwrap();
        assert_eq!(sim.t_download(D0, address + G - 64, 64).unwrap(), [round + 1; 64]);
        sim.t_unmapped(address, G, chunk);
    }
    assert_eq!(sim.check_clean(), Ok(()));
}

#[test]
fn map_answers_as_measured() {
    let sim = sim();
    let va = sim.address_reserve(4 * G, 0, 0).unwrap();
    let chunk = sim.create(2 * G, &props(D0)).unwrap();
    // SAFETY: the simulator checks handles itself.
    let with_offset = unsafe { sim.map(va, G, G, chunk) };
    assert_eq!(code(with_offset), Code::NOT_SUPPORTED);
    assert_eq!(code(sim.t_map(va, G, chunk)), Code::NOT_SUPPORTED);
    assert_eq!(code(sim.t_map(va, 4 * G, chunk)), Code::NOT_SUPPORTED);
    assert_eq!(code(sim.t_map(va + 4096, 2 * G, chunk)), Code::INVALID_VALUE);
    assert_eq!(code(sim.t_map(va + 3 * G, 2 * G, chunk)), Code::INVALID_VALUE);
    assert_eq!(code(sim.t_map(G, 2 * G, chunk)), Code::INVALID_VALUE);
    sim.t_map(va, 2 * G, chunk).unwrap();
    let other = sim.create(2 * G, &props(D0)).unwrap();
    assert_eq!(code(sim.t_map(va, 2 * G, other)), Code::INVALID_VALUE);
    assert_eq!(code(sim.t_map(va + G, 2 * G, other)), Code::INVALID_VALUE);
    assert_eq!(code(sim.t_map(va + 2 * G, 2 * G, ChunkHandle(77))), Code::INVALID_VALUE);

    // The alias sees the same bytes.
    sim.t_map(va + 2 * G, 2 * G, chunk).unwrap();
    sim.set_access(va, 4 * G, &[AccessGrant::read_write(D0)]).unwrap();
    sim.t_upload(D0, va + 5, b"twice").unwrap();
    assert_eq!(sim.t_download(D0, va + 2 * G + 5, 5).unwrap(), b"twice");
}

#[test]
fn one_chunk_maps_across_two_adjacent_ranges() {
    let sim = sim();
    let first = sim.address_reserve(G, 0, 0).unwrap();
    let second = sim.address_reserve(G, 0, first + G).unwrap();
    assert_eq!(second, first + G);
    let chunk = sim.create(2 * G, &props(D0)).unwrap();
    sim.t_map(first, 2 * G, chunk).unwrap();
    sim.set_access(first, 2 * G, &[AccessGrant::read_write(D0)]).unwrap();
    assert_eq!(code(sim.address_free(second, G)), Code::INVALID_VALUE);
    sim.unmap(first, 2 * G).unwrap();
    sim.address_free(first, G).unwrap();
    sim.address_free(second, G).unwrap();
}

#[test]
fn copies_need_access_and_respect_its_kind() {
    let sim = sim();
    let va = sim.address_reserve(G, 0, 0).unwrap();
    let chunk = sim.create(G, &props(D0)).unwrap();
    sim.t_map(va, G, chunk).unwrap();
    let fill = Transfer::Fill8 { dst: va, value: 1, bytes: 16 };
    assert_eq!(code(sim.t_upload(D0, va, &[1; 16])), Code::INVALID_VALUE);
    assert_eq!(code(sim.t_copy(D0, fill)), Code::INVALID_VALUE);

    let access = |access| AccessGrant { location: Location::Device(D0), access };
    sim.set_access(va, G, &[access(Access::Read)]).unwrap();
    assert_eq!(code(sim.t_upload(D0, va, &[1; 16])), Code::INVALID_VALUE);
    assert!(sim.t_download(D0, va, 16).is_ok());
    sim.set_access(va, G, &[access(Access::ReadWrite)]).unwrap();
    assert!(sim.t_copy(D0, fill).is_ok());
    assert_eq!(sim.get_access(va + 5, Location::Device(D0)).unwrap(), Access::ReadWrite);
    sim.set_access(va, G, &[access(Access::None)]).unwrap();
    assert_eq!(code(sim.t_download(D0, va, 16)), Code::INVALID_VALUE);

    // A fresh mapping starts with none, for the owner too.
    sim.set_access(va, G, &[access(Access::ReadWrite)]).unwrap();
    sim.unmap(va, G).unwrap();
    sim.t_map(va, G, chunk).unwrap();
    assert_eq!(sim.get_access(va, Location::Device(D0)).unwrap(), Access::None);
    assert_eq!(code(sim.t_download(D0, va, 16)), Code::INVALID_VALUE);
}

#[test]
fn set_access_answers_as_measured() {
    let sim = sim();
    let grant = [AccessGrant::read_write(D0)];
    let va = sim.address_reserve(4 * G, 0, 0).unwrap();
    assert_eq!(code(sim.set_access(va, G, &grant)), Code::INVALID_VALUE);
    let chunk = sim.create(G, &props(D0)).unwrap();
    let wide = sim.create(2 * G, &props(D0)).unwrap();
    sim.t_map(va, G, chunk).unwrap();
    sim.t_map(va + 2 * G, 2 * G, wide).unwrap();
    assert_eq!(code(sim.set_access(va, 2 * G, &grant)), Code::INVALID_VALUE, "a hole at the end");
    let from_hole = sim.set_access(va + G, 3 * G, &grant);
    assert_eq!(code(from_hole), Code::INVALID_VALUE, "a hole at the start");
    assert_eq!(code(sim.set_access(va + 2 * G, G, &grant)), Code::INVALID_VALUE, "half");
    assert_eq!(code(sim.set_access(va + 3 * G, G, &grant)), Code::INVALID_VALUE, "half");
    assert_eq!(code(sim.set_access(va, G, &[])), Code::INVALID_VALUE);
    let nobody = [AccessGrant::read_write(DeviceId(99))];
    assert_eq!(code(sim.set_access(va, G, &nobody)), Code::INVALID_VALUE);
    let host = [AccessGrant { location: Location::Host, access: Access::ReadWrite }];
    assert_eq!(code(sim.set_access(va, G, &host)), Code::NOT_SUPPORTED);
    let alias = sim.create(G, &props(D1)).unwrap();
    sim.t_map(va + G, G, alias).unwrap();
    assert!(sim.set_access(va, 4 * G, &grant).is_ok(), "several whole mappings");
    assert!(sim.set_access(va, 4 * G, &[AccessGrant::read_write(D1)]).is_ok(), "no peer enabling");
}

#[test]
fn what_lies_in_or_behind_a_hole_gets_no_access() {
    let sim = sim();
    let own = Location::Device(D0);
    let grant = [AccessGrant::read_write(D0)];
    let va = sim.address_reserve(4 * G, 0, 0).unwrap();
    let chunk = sim.create(G, &props(D0)).unwrap();
    for place in [0, 3 * G] {
        sim.t_map(va + place, G, chunk).unwrap();
    }
    sim.set_access(va, 4 * G, &grant).unwrap();
    sim.t_map(va + G, G, chunk).unwrap();
    let says = [0, G, 3 * G].map(|place| sim.get_access(va + place, own).unwrap());
    assert_eq!(says, [Access::ReadWrite, Access::None, Access::None]);
    assert_eq!(code(sim.get_access(va + 2 * G, own)), Code::INVALID_VALUE);
}

#[test]
fn asked_for_the_host_get_access_tells_the_memorys_own_device() {
    let sim = sim();
    let asked = |address, location| sim.get_access(address, location).unwrap();
    for (home, other) in [(D0, D1), (D1, D0)] {
        let (va, _) = sim.t_mapped(home, G);
        assert_eq!(asked(va, Location::Host), Access::ReadWrite);
        assert_eq!(asked(va, Location::HostNuma(0)), Access::None);
        assert_eq!(asked(va, Location::Device(other)), Access::None);
        let location = Location::Device(home);
        sim.set_access(va, G, &[AccessGrant { location, access: Access::None }]).unwrap();
        assert_eq!(asked(va, Location::Host), Access::None);
    }
}

#[test]
fn copies_go_by_the_grants_of_the_device_in_whose_context_they_run() {
    let sim = sim();
    let (a, _) = sim.t_mapped(D0, G);
    let (b, _) = sim.t_mapped(D1, G);
    sim.t_upload(D0, a, b"over").unwrap();
    assert_eq!(code(sim.t_upload(D1, a, b"over")), Code::INVALID_VALUE);
    let plain = Transfer::DeviceToDevice { dst: b, src: a, bytes: 4 };
    assert_eq!(code(sim.t_copy(D0, plain)), Code::INVALID_VALUE);
    let peer = Transfer::Peer { dst: b, dst_device: D1, src: a, src_device: D0, bytes: 4 };
    sim.t_copy(D0, peer).unwrap();
    assert_eq!(sim.t_download(D1, b, 4).unwrap(), b"over");
}

#[test]
fn unmap_answers_as_measured() {
    let sim = sim();
    let va = sim.address_reserve(4 * G, 0, 0).unwrap();
    let wide = sim.create(2 * G, &props(D0)).unwrap();
    let chunk = sim.create(G, &props(D0)).unwrap();
    sim.t_map(va, 2 * G, wide).unwrap();
    sim.t_map(va + 3 * G, G, chunk).unwrap();
    assert_eq!(code(sim.unmap(va, G)), Code::INVALID_VALUE);
    assert_eq!(code(sim.unmap(va + G, G)), Code::INVALID_VALUE);
    assert_eq!(code(sim.unmap(va, 4096)), Code::INVALID_VALUE);
    sim.unmap(va, 4 * G).unwrap();
    sim.unmap(va, 4 * G).unwrap();
    assert_eq!(sim.ledger_summary().mappings, 0);
}

#[test]
fn references_keep_memory_and_a_double_release_is_refused() {
    let sim = sim();
    let before = free_bytes(&sim);
    let (va, chunk) = sim.t_mapped(D0, 2 * G);
    sim.t_upload(D0, va, b"kept").unwrap();
    sim.t_release(chunk).unwrap();
    assert_eq!(before - free_bytes(&sim), 2 * G);
    assert_eq!(code(sim.t_release(chunk)), Code::INVALID_VALUE);
    // The value still maps elsewhere while a mapping lives.
    let alias = sim.address_reserve(2 * G, 0, 0).unwrap();
    sim.t_map(alias, 2 * G, chunk).unwrap();
    sim.set_access(alias, 2 * G, &[AccessGrant::read_write(D0)]).unwrap();
    sim.unmap(va, 2 * G).unwrap();
    assert_eq!(sim.t_download(D0, alias, 4).unwrap(), b"kept");
    // Retain mid-chunk gives the same value, and one more reference.
    assert_eq!(sim.retain(alias + G + 7).unwrap(), chunk);
    sim.unmap(alias, 2 * G).unwrap();
    assert_eq!(before - free_bytes(&sim), 2 * G);
    sim.t_release(chunk).unwrap();
    assert_eq!(free_bytes(&sim), before);
    assert_eq!(code(sim.t_map(alias, 2 * G, chunk)), Code::INVALID_VALUE);
    assert_eq!(code(sim.retain(alias)), Code::INVALID_VALUE);
}

#[test]
fn address_free_takes_exactly_one_empty_range() {
    let sim = sim();
    let va = sim.address_reserve(2 * G, 0, 0).unwrap();
    let chunk = sim.create(G, &props(D0)).unwrap();
    sim.t_map(va, G, chunk).unwrap();
    assert_eq!(code(sim.address_free(va, 2 * G)), Code::INVALID_VALUE);
    sim.unmap(va, G).unwrap();
    assert_eq!(code(sim.address_free(va, G)), Code::INVALID_VALUE);
    sim.address_free(va, 2 * G).unwrap();
    assert_eq!(code(sim.address_free(va, 2 * G)), Code::INVALID_VALUE);
}

#[test]
fn pointers_are_described_as_measured() {
    let sim = sim();
    let va = sim.address_reserve(3 * G, 0, 0).unwrap();
    let chunk = sim.create(2 * G, &props(D1)).unwrap();
    sim.t_map(va + G, 2 * G, chunk).unwrap();
    // Found by whoever has access, its own device too.
    assert_eq!(code(sim.address_range(D1, va + G)), Code::NOT_FOUND);
    sim.set_access(va + G, 2 * G, &[AccessGrant::read_write(D1)]).unwrap();
    assert_eq!(sim.address_range(D1, va + 2 * G + 9).unwrap(), (va + G, 2 * G));
    assert_eq!(code(sim.address_range(D0, va + G)), Code::NOT_FOUND);
    let read = AccessGrant { location: Location::Device(D0), access: Access::Read };
    sim.set_access(va + G, 2 * G, &[read]).unwrap();
    assert_eq!(sim.address_range(D0, va + G).unwrap(), (va + G, 2 * G));
    assert_eq!(code(sim.address_range(D1, va)), Code::NOT_FOUND);
    let expected =
        PointerInfo { memory_type: 2, device: D1, context: None, legacy_ipc_capable: false };
    assert_eq!(sim.pointer_info(va + G).unwrap(), expected);
    // An address that the driver does not know is no error.
    assert_eq!(sim.pointer_info(va).unwrap().memory_type, 0);
    assert_eq!(code(sim.legacy_ipc_export(D1, va + G)), Code::INVALID_VALUE);
    assert_eq!(code(sim.mem_free(D1, va + G)), Code::INVALID_VALUE);
    assert_eq!(sim.ledger_summary().mappings, 1);
}

#[test]
fn a_big_machine_costs_nothing_until_it_is_touched() {
    let sim = Sim::builder().devices(16).build();
    let bytes = 128 << 30;
    let (va, chunk) = sim.t_mapped(DeviceId(15), bytes);
    let far = va + bytes - 8;
    assert_eq!(sim.t_download(DeviceId(15), far, 8).unwrap(), [0; 8]);
    let fill = Transfer::Fill8 { dst: va, value: 0, bytes };
    sim.t_copy(DeviceId(15), fill).unwrap();
    sim.t_unmapped(va, bytes, chunk);
}
