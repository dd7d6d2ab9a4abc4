//! Blocks, memory that follows them, tables.

use vmm_kv::{BlockTables, Dtype, KvError, KvShape, PagedCache, PagedSequence};
use vmm_sys::Call;

use crate::harness::*;

#[test]
fn handles_may_go_to_other_threads() {
    fn is_send<T: Send>() {}
    fn is_sync<T: Sync>() {}
    is_send::<PagedSequence>();
    is_send::<PagedCache>();
    is_sync::<PagedCache>();
}

#[test]
fn memory_comes_with_the_blocks_and_goes_with_them() {
    let machine = Machine::small(64);
    let cache = machine.builder().build().unwrap();
    assert_eq!(cache.layout().block_bytes(), G / 4);
    assert_eq!((cache.stats().committed_bytes, cache.max_tokens()), (0, 1024));
    let mut one = written(&cache, 9, 100);
    let two = written(&cache, 4, 200);
    assert_eq!((one.0.blocks(), two.0.blocks()), (vec![0, 1, 2], vec![3]));
    let stats = cache.stats();
    assert_eq!((stats.committed_bytes, stats.idle_bytes, stats.sequences), (G, 0, 2));
    assert_eq!((stats.tokens, stats.slack_bytes), (13, 3 * (128 << 10)));
    extend(&cache, &mut one, 4, 300);
    assert_eq!(one.0.blocks(), [0, 1, 2, 4]);
    check(&cache, &one.0, &one.1);
    check(&cache, &two.0, &two.1);
    drop(two);
    one.0.truncate(3);
    one.1.truncate(3);
    check(&cache, &one.0, &one.1);
    // The second chunk went; the freed blocks of the first are taken anew, the lowest first.
    assert_eq!(cache.stats().committed_bytes, G);
    assert_eq!(cache.open(6).unwrap().blocks(), [1, 2]);
    cache.verify().unwrap();
    let address = cache.address();
    assert_eq!(cache.clone().address(), address);
    drop((one, cache));
    machine.end();
}

#[test]
fn sequences_outlive_the_cache_and_end_in_any_thread() {
    let machine = Machine::small(64);
    let cache = machine.builder().background(true).build().unwrap();
    let sequence = cache.open(40).unwrap();
    drop(cache);
    std::thread::spawn(move || {
        let mut sequence = sequence;
        assert_eq!(sequence.append(100).unwrap(), 40);
    })
    .join()
    .unwrap();
    machine.end();
}

#[test]
fn what_cannot_be_is_refused() {
    let machine = Machine::small(64);
    let refused = |builder: vmm_kv::PagedBuilder| match builder.build() {
        Err(KvError::BadSetting { setting, .. }) => setting,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(machine.builder().max_blocks(0)), "max_blocks");
    assert_eq!(refused(machine.builder().max_blocks(1 << 31)), "max_blocks");
    assert_eq!(refused(machine.builder().chunk_bytes(0)), "chunk_bytes");
    let host = vmm_pool::Place::HostNuma(0);
    assert_eq!(refused(machine.builder().host_blocks(host, 0)), "host_blocks");
    assert!(matches!(machine.builder().chunk_bytes(G + 1).build(), Err(KvError::Pool(_))));
    assert!(matches!(machine.builder().block_tokens(0).build(), Err(KvError::Layout(_))));
    let cache = machine.builder().max_blocks(4).build().unwrap();
    assert!(matches!(cache.open(17), Err(KvError::TooLong { tokens: 17, max_tokens: 16 })));
    let mut sequence = cache.open(16).unwrap();
    assert!(matches!(sequence.append(1), Err(KvError::TooLong { .. })));
    assert!(matches!(sequence.append(u64::MAX), Err(KvError::TooLong { .. })));
    assert!(matches!(sequence.fork_at(17), Err(KvError::TooLong { .. })));
    let error = cache.open(1).unwrap_err();
    assert!(error.is_shortage(), "every block is taken: {error}");
    assert_eq!(sequence.tokens(), 16);
    drop((sequence, cache));
    machine.end();
}

#[test]
fn a_chunk_is_as_long_as_whole_blocks_unless_that_is_too_long() {
    let machine = Machine::small(64);
    let chunk_bytes = |heads: u32, block_tokens: u32| {
        let shape = KvShape::new(1, heads, 64, Dtype::F16).unwrap();
        let builder = PagedCache::builder(&machine.pool, &machine.stream, shape);
        let cache = builder.block_tokens(block_tokens).max_blocks(100).build().unwrap();
        cache.buffer().chunk_bytes()
    };
    // A head of a token takes 256 bytes.
    assert_eq!(chunk_bytes(1, 16), G);
    assert_eq!(chunk_bytes(3, 16), 3 * G);
    assert_eq!(chunk_bytes(1 << 10, 40), 5 * G);
    assert_eq!(chunk_bytes(17, 16), G);
}

#[test]
fn a_token_for_each_of_256_sequences_makes_no_driver_call() {
    let machine = Machine::new(|sim| sim, |pool| pool);
    let builder = machine.builder().max_blocks(4096).ahead_blocks(1024);
    let cache = builder.build().unwrap();
    let mut sequences: Vec<PagedSequence> =
        (0..256).map(|n| cache.open(1 + n % 4).unwrap()).collect();
    let mut tables = BlockTables::new(256, 64);
    let refs: Vec<&PagedSequence> = sequences.iter().collect();
    assert_eq!(tables.update(&refs).unwrap().len(), 256);
    for step in 0..4 {
        let calls = machine.calls();
        for sequence in &mut sequences {
            sequence.append(1).unwrap();
        }
        let refs: Vec<&PagedSequence> = sequences.iter().collect();
        // A quarter of them begins a block in each step.
        assert_eq!(tables.update(&refs).unwrap().len(), 64);
        assert_eq!(machine.calls(), calls, "step {step}");
    }
    assert_eq!(cache.stats().tokens, 256 * 4 + 64 * (1 + 2 + 3 + 4));
    // Announcing a step is one event, however many sequences.
    drop(cache.use_now().unwrap());
    let before = machine.driver.ledger().snapshot();
    drop(cache.use_now().unwrap());
    let made = machine.driver.ledger().snapshot().since(&before);
    assert_eq!(made.of(Call::EventRecord), 1, "{:?}", made.nonzero().collect::<Vec<_>>());
    cache.verify().unwrap();
    drop((sequences, cache));
    machine.end();
}

#[test]
fn tables_show_blocks_and_say_which_rows_changed() {
    let machine = Machine::small(64);
    let cache = machine.builder().build().unwrap();
    let (mut one, two) = (cache.open(9).unwrap(), cache.open(5).unwrap());
    let mut tables = BlockTables::new(3, 4);
    assert_eq!(tables.update(&[&one, &two]).unwrap(), [0, 1]);
    assert_eq!(tables.as_slice(), [0, 1, 2, 0, 3, 4, 0, 0, 0, 0, 0, 0]);
    assert_eq!((tables.seq_lens(), tables.blocks_in_rows()), (&[9, 5, 0][..], &[3, 2, 0][..]));
    assert_eq!(tables.update(&[&one, &two]).unwrap(), [0; 0]);
    one.append(4).unwrap();
    assert_eq!(tables.update(&[&one, &two]).unwrap(), [0]);
    assert_eq!((tables.row(0), tables.row(3)), (&[0, 1, 2, 5][..], &[][..]));
    // Rows change hands, and what was longer leaves nothing behind.
    assert_eq!(tables.update(&[&two]).unwrap(), [0, 1]);
    assert_eq!(tables.as_slice(), [3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    one.truncate(2);
    assert_eq!(tables.update(&[&two, &one, &two]).unwrap(), [1, 2]);
    assert_eq!(tables.row(1), [0, 0, 0, 0]);
    // Refused, and nothing is changed.
    let before = tables.clone();
    let long = cache.open(17).unwrap();
    let other = machine.builder().build().unwrap();
    let foreign = other.open(1).unwrap();
    let error = tables.update(&[&long]).unwrap_err();
    assert!(matches!(error, KvError::TooLong { tokens: 17, max_tokens: 16 }));
    assert!(matches!(tables.update(&[&one, &foreign]), Err(KvError::OtherCache)));
    let error = tables.update(&[&one, &one, &one, &one]).unwrap_err();
    assert!(matches!(error, KvError::TooManySequences { max_sequences: 3 }));
    assert_eq!((before.as_slice(), before.seq_lens()), (tables.as_slice(), tables.seq_lens()));
    assert_eq!(tables.update(&[]).unwrap(), [0, 1, 2]);
    assert_eq!(tables.seq_lens(), [0, 0, 0]);
    drop((one, two, long, foreign, other, cache));
    machine.end();
}
