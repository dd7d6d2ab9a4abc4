//! What the heap says in words, and its clock.

use vmm_heap::{Heap, HeapConfig};

const UNIT: u64 = 1 << 20;

#[test]
fn what_is_no_block_says_what_was_asked_and_leaves_the_clock() {
    let mut heap = Heap::new(HeapConfig::default());
    heap.insert_free(0, 4 * UNIT);
    let block = heap.alloc(UNIT, 1).unwrap();
    let tick = heap.tick();
    assert!(tick > 0, "an operation was done");
    let text = heap.alloc(8 * UNIT, 4096).unwrap_err().to_string();
    assert_eq!(text, format!("no free space of {} bytes aligned to 4096", 8 * UNIT));
    let text = heap.remove_free(block.offset, UNIT).unwrap_err().to_string();
    let start = format!("[{:#x}, +{UNIT:#x}) is not a range", block.offset);
    assert!(text.starts_with(&start), "{text}");
    let text = heap.free(block.offset + 512).unwrap_err().to_string();
    assert_eq!(text, format!("no live block starts at offset {:#x}", block.offset + 512));
    heap.free(block.offset).unwrap();
    assert!(heap.tick() > tick);
    // Its tables are long: the figures stand for them.
    let text = format!("{heap:?}");
    assert!(text.starts_with("Heap { config: ") && text.len() < 1000, "{text}");
    assert!(text.contains(&format!("{:?}", heap.stats())), "{text}");
    heap.verify().unwrap();
}
