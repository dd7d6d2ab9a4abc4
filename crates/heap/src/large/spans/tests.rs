use super::*;

const CELL_BYTES: u64 = 1 << CELL_SHIFT;

/// Spans of one granule at the given offsets, all used.
fn spans(offsets: &[u64]) -> Spans {
    let mut spans = Spans::new();
    let mut prev = NIL;
    for &offset in offsets {
        spans.cover(offset, GRANULE_BYTES);
        prev = spans.insert_after(prev, offset, Size::Used(GRANULE_BYTES), 0);
    }
    spans.verify().unwrap();
    spans
}

#[test]
fn locate_finds_the_last_start_at_or_before() {
    let far = 5 << 40;
    let offsets = [512, 1024, CELL_BYTES * 3, (1 << 30) - 512, 1 << 30, far];
    let spans = spans(&offsets);
    assert_eq!(spans.locate(0), NIL);
    for (i, &offset) in offsets.iter().enumerate() {
        let limit = offsets.get(i + 1).copied().unwrap_or(far * 2);
        for at in [offset, offset + 512, limit - 1] {
            if at < limit {
                assert_eq!(spans.at(spans.locate(at)).offset, offset, "locate({at:#x})");
            }
        }
    }
}

#[test]
fn several_spans_of_one_cell_are_found_and_leave_in_any_order() {
    let offsets: Vec<u64> = (0..512).map(|i| CELL_BYTES + i * 512).collect();
    let mut spans = spans(&offsets);
    assert!(spans.used_at(CELL_BYTES - 512).is_none());
    for i in (0..512).map(|i| (i * 37) % 512) {
        let id = spans.used_at(offsets[i]).unwrap();
        assert_eq!(spans.at(id).offset, offsets[i]);
        spans.unlink(id);
        assert!(spans.used_at(offsets[i]).is_none());
        spans.verify().unwrap();
    }
    assert_eq!(spans.iter().count(), 0);
}

#[test]
fn a_sparse_space_costs_only_the_regions_it_uses() {
    let spans = spans(&[0, 100 << 40]);
    assert!(spans.metadata_bytes() < 2 << 20, "{}", spans.metadata_bytes());
}
