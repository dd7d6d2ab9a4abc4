//! Layouts: no two bytes at one place, nothing beyond the span, no overflow.
#![allow(clippy::unwrap_used, reason = "a failure ends the test")]

use proptest::prelude::*;
use vmm_kv::{BlockLayout, Dtype, KvShape, LayoutError, Order, Part, SequenceLayout};

const DTYPES: [Dtype; 5] = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Fp8, Dtype::Int8];
const ORDERS: [Order; 2] = [Order::TokenMajor, Order::LayerMajor];
const PARTS: [Part; 2] = [Part::Key, Part::Value];

fn small_shape() -> impl Strategy<Value = KvShape> {
    (1u32..5, 1u32..5, 1u32..9, prop::sample::select(&DTYPES[..]))
        .prop_map(|(layers, heads, dim, dtype)| KvShape::new(layers, heads, dim, dtype).unwrap())
}

/// Every head of every token of every layer, keys and values.
fn heads(shape: KvShape, tokens: u64) -> impl Iterator<Item = (u32, Part, u64, u32)> {
    (0..shape.layers()).flat_map(move |layer| {
        PARTS.into_iter().flat_map(move |part| {
            (0..tokens).flat_map(move |token| {
                (0..shape.kv_heads()).map(move |head| (layer, part, token, head))
            })
        })
    })
}

/// Whether ranges of equal length starting there are disjoint and end at `end` at most.
fn check_disjoint(mut starts: Vec<u64>, bytes: u64, end: u64) {
    starts.sort_unstable();
    assert!(starts.windows(2).all(|pair| pair[0] + bytes <= pair[1]), "two heads overlap");
    assert!(starts.last().is_none_or(|last| last + bytes <= end), "beyond the end");
}

proptest! {
    #[test]
    fn heads_of_a_sequence_lie_apart_and_in_its_ranges(
        shape in small_shape(),
        max_tokens in 1u64..40,
        order in prop::sample::select(&ORDERS[..]),
        align in prop::sample::select(&[1u64, 64, 100, 4096][..]),
        cut in (0u64..40, 0u64..60),
    ) {
        let layout = SequenceLayout::aligned(shape, max_tokens, order, align).unwrap();
        let at = |(layer, part, token, head)| layout.offset(layer, part, token, head);
        check_disjoint(heads(shape, max_tokens).map(at).collect(), shape.head_bytes(), layout.span_bytes());
        prop_assert_eq!(layout.span_bytes() % align, 0);
        // A head lies within the ranges of exactly those tokens that were named.
        let tokens = cut.0.min(cut.1)..cut.0.max(cut.1);
        let ranges: Vec<_> = layout.ranges(tokens.clone()).collect();
        for it in heads(shape, max_tokens) {
            let start = at(it);
            let inside = ranges.iter().any(|r| r.start <= start && start + shape.head_bytes() <= r.end);
            prop_assert_eq!(inside, tokens.contains(&it.2), "{:?} in {:?}", it, ranges);
        }
        let covered: u64 = ranges.iter().map(|r| r.end - r.start).sum();
        let named = tokens.end.min(max_tokens).saturating_sub(tokens.start);
        prop_assert_eq!(covered, named * shape.token_bytes());
    }

    #[test]
    fn heads_of_blocks_lie_apart(shape in small_shape(), block_tokens in 1u32..9, blocks in 1u32..5) {
        let layout = BlockLayout::new(shape, block_tokens).unwrap();
        let tokens = u64::from(block_tokens) * u64::from(blocks);
        let at = |(layer, part, token, head)| {
            let (block, in_block) = layout.locate(token);
            let start = layout.bytes_of(block as u32).start;
            start + layout.offset_in_block(layer, part, in_block, head)
        };
        let end = layout.blocks_bytes(u64::from(blocks)).unwrap();
        check_disjoint(heads(shape, tokens).map(at).collect(), shape.head_bytes(), end);
        prop_assert_eq!(heads(shape, tokens).count() as u64 * shape.head_bytes(), end);
        prop_assert_eq!(layout.blocks_for(tokens), u64::from(blocks));
        prop_assert_eq!(layout.blocks_for(tokens + 1), u64::from(blocks) + 1);
    }

    #[test]
    fn shards_have_every_head_once(heads in 1u32..129, shards in 1u32..129) {
        let whole = KvShape::new(2, heads, 16, Dtype::F16).unwrap();
        let parts: Result<Vec<_>, _> = (0..shards).map(|index| whole.shard(index, shards)).collect();
        match parts {
            Err(error) => {
                prop_assert_eq!(error, LayoutError::Split { kv_heads: heads, shards });
                prop_assert!(heads % shards != 0 && shards % heads != 0);
            }
            Ok(parts) => {
                let copies = (shards / heads).max(1);
                let mut owners = vec![0; heads as usize];
                for part in &parts {
                    for head in part.first_head()..part.first_head() + part.kv_heads() {
                        owners[head as usize] += 1;
                    }
                }
                prop_assert!(owners.iter().all(|count| *count == copies), "{owners:?}");
                let bytes: u64 = parts.iter().map(KvShape::token_bytes).sum();
                prop_assert_eq!(bytes, whole.token_bytes() * u64::from(copies));
            }
        }
    }

    #[test]
    fn nothing_overflows(
        counts in (any::<u32>(), any::<u32>(), any::<u32>()),
        dtype in prop::sample::select(&DTYPES[..]),
        tokens in any::<u64>(),
        block_tokens in any::<u32>(),
        order in prop::sample::select(&ORDERS[..]),
        align in any::<u64>(),
    ) {
        let exact = u128::from(counts.0) * 2 * u128::from(counts.1) * u128::from(counts.2)
            * u128::from(dtype.bytes());
        let Ok(shape) = KvShape::new(counts.0, counts.1, counts.2, dtype) else {
            prop_assert!(exact == 0 || exact > 1 << 63);
            return Ok(());
        };
        prop_assert_eq!(u128::from(shape.token_bytes()), exact);
        match SequenceLayout::aligned(shape, tokens, order, align) {
            Ok(layout) => {
                let last = layout.offset(
                    shape.layers() - 1, Part::Value, tokens - 1, shape.kv_heads() - 1,
                );
                prop_assert!(last + shape.head_bytes() <= layout.span_bytes());
                prop_assert!(u128::from(layout.span_bytes()) >= exact * u128::from(tokens));
            }
            Err(LayoutError::Zero { .. }) => prop_assert!(tokens == 0 || align == 0),
            Err(_) => {
                let parts = 2 * u128::from(shape.layers());
                let most = (exact * u128::from(tokens)).saturating_add(parts * u128::from(align));
                prop_assert!(most > 1 << 63);
            }
        }
        if let Ok(blocks) = BlockLayout::new(shape, block_tokens) {
            prop_assert_eq!(u128::from(blocks.block_bytes()), exact * u128::from(block_tokens));
            prop_assert_eq!(blocks.blocks_bytes(tokens).is_ok(),
                u128::from(blocks.block_bytes()) * u128::from(tokens) <= 1 << 63);
        }
    }
}

#[test]
fn what_does_not_exist_is_refused_by_name() {
    let zero = |what| Err(LayoutError::Zero { what });
    assert_eq!(KvShape::new(0, 1, 1, Dtype::F16), zero("layers"));
    assert_eq!(KvShape::new(1, 0, 1, Dtype::F16), zero("kv_heads"));
    assert_eq!(KvShape::new(1, 1, 0, Dtype::F16), zero("head_dim"));
    let shape = KvShape::new(1, 6, 64, Dtype::F16).unwrap();
    assert_eq!(shape.shard(0, 0), zero("shards"));
    assert_eq!(shape.shard(3, 3), Err(LayoutError::NoShard { index: 3, shards: 3 }));
    assert_eq!(shape.shard(0, 4), Err(LayoutError::Split { kv_heads: 6, shards: 4 }));
    let message = shape.shard(0, 4).unwrap_err().to_string();
    assert!(message.contains("6 heads") && message.contains("4 devices"), "{message}");
}

#[test]
fn a_vllm_cache_of_one_layer_is_a_strided_view() {
    // [num_blocks, block_tokens, kv_heads, head_dim] of layer 3's values.
    let shape = KvShape::new(32, 8, 128, Dtype::F16).unwrap();
    let layout = BlockLayout::new(shape, 16).unwrap();
    let (base, block, token, head) = (layout.layer_offset(3, Part::Value), 5, 7, 2);
    let by_strides = base
        + block * layout.block_bytes()
        + token * (8 * 128 * 2) // dense within a block
        + head * (128 * 2);
    let by_layout = layout.bytes_of(block as u32).start
        + layout.offset_in_block(3, Part::Value, token as u32, head as u32);
    assert_eq!(by_strides, by_layout);
}
