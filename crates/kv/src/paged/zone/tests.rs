use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const UNIT: u64 = 64 << 10;

fn geometry(block_units: u64, chunk_units: u64, first_block: u32, blocks: u32) -> Geometry {
    let (block_bytes, chunk_bytes) = (block_units * UNIT, chunk_units * UNIT);
    Geometry { first_block, blocks, block_bytes, chunk_bytes, keeps_first: first_block == 0 }
}

fn grow(zone: &mut Zone, blocks: u64) -> Plan {
    let plan = zone.plan_growth(blocks);
    zone.stand(&plan.chunks);
    plan
}

fn release(zone: &mut Zone, keep_bytes: u64, keep_blocks: u64) -> usize {
    let chunks = zone.surplus(keep_bytes, keep_blocks);
    zone.vacate(&chunks);
    chunks.len()
}

fn pack(zone: &mut Zone, max_blocks: u64) -> Vec<Shift> {
    let shifts = zone.plan_pack(max_blocks);
    for shift in &shifts {
        zone.hold(shift.from);
        zone.hold(shift.to);
    }
    shifts.iter().for_each(|shift| zone.hand_over(*shift));
    shifts
}

#[test]
fn blocks_and_chunks_touch_each_other_both_ways() {
    for geometry in [geometry(4, 16, 0, 9), geometry(10, 32, 0, 50), geometry(80, 32, 7, 20)] {
        for index in 0..geometry.blocks {
            for chunk in 0..geometry.chunks() {
                let touches = geometry.chunks_of(index).contains(&chunk);
                assert_eq!(touches, geometry.blocks_in(chunk).contains(&index), "{geometry:?}");
            }
        }
        let bytes = geometry.bytes();
        assert_eq!(u64::from(geometry.chunks()) * geometry.chunk_bytes, bytes.end - bytes.start);
    }
}

#[test]
fn a_block_is_free_once_every_chunk_that_it_touches_stands() {
    // Blocks of 10, chunks of 16: the second block lies in the first and the second chunk.
    let mut zone = Zone::new(geometry(10, 16, 0, 8));
    let plan = grow(&mut zone, 1);
    assert_eq!(plan, Plan { chunks: vec![0], blocks: 1 });
    assert_eq!((zone.free_blocks(), zone.take(), zone.take()), (1, Some(0), None));
    assert_eq!(grow(&mut zone, 1), Plan { chunks: vec![1], blocks: 1 });
    // The third block, 20 to 30, came with it.
    assert_eq!((zone.take(), zone.take(), zone.take()), (Some(1), Some(2), None));
    // More than there is.
    let plan = grow(&mut zone, 100);
    assert_eq!(plan, Plan { chunks: vec![2, 3, 4], blocks: 5 });
    assert_eq!((zone.lacking_blocks(), zone.empty_bytes()), (0, 3 * 16 * UNIT));
}

#[test]
fn the_highest_empty_chunks_go_first_and_what_is_to_be_kept_stays() {
    let mut zone = Zone::new(geometry(4, 16, 0, 40));
    grow(&mut zone, 40);
    assert_eq!(zone.surplus(8 * 16 * UNIT, 0), [8, 9]);
    assert_eq!(zone.surplus(0, 36), [9]);
    assert_eq!(zone.surplus(0, 37), [0; 0]);
    zone.hold(13);
    // The first chunk stays while any block is taken.
    assert_eq!(zone.surplus(0, 0), [1, 2, 4, 5, 6, 7, 8, 9]);
    assert_eq!(zone.ranges(&[1, 2, 4]), [16 * UNIT..48 * UNIT, 64 * UNIT..80 * UNIT]);
    zone.let_go(13);
    assert_eq!(release(&mut zone, 0, 0), 10);
    assert_eq!(zone.standing_bytes(), 0);
}

#[test]
fn what_is_packed_lies_in_as_few_chunks_as_it_can() {
    let mut zone = Zone::new(geometry(4, 16, 0, 400));
    grow(&mut zone, 400);
    let taken: Vec<u32> = (0..400).map_while(|_| zone.take()).collect();
    // Every seventh stays.
    taken.iter().filter(|block| *block % 7 != 3).for_each(|block| zone.drop_ref(*block));
    assert_eq!(zone.owned_blocks(), 57);
    let shifts = pack(&mut zone, u64::MAX);
    assert!(shifts.len() < 57, "those in the chunks that are filled stay: {}", shifts.len());
    release(&mut zone, 0, 0);
    // 57 blocks in chunks of 4.
    assert_eq!(zone.standing_bytes(), 15 * 16 * UNIT);
    assert_eq!(zone.plan_pack(u64::MAX), []);
}

#[test]
fn few_moves_at_a_time_come_to_the_same() {
    let mut zone = Zone::new(geometry(1, 16, 0, 160));
    grow(&mut zone, 160);
    let taken: Vec<u32> = (0..160).map_while(|_| zone.take()).collect();
    taken.iter().filter(|block| **block % 16 >= 7).for_each(|block| zone.drop_ref(*block));
    let mut moves = 0;
    loop {
        let shifts = pack(&mut zone, 3);
        moves += shifts.len();
        if shifts.is_empty() {
            break;
        }
    }
    release(&mut zone, 0, 0);
    // 70 blocks in chunks of 16.
    assert_eq!(zone.standing_bytes(), 5 * 16 * UNIT);
    assert!(moves <= 35, "{moves}");
}

#[test]
fn what_is_on_its_way_is_not_packed() {
    let mut zone = Zone::new(geometry(4, 16, 0, 40));
    grow(&mut zone, 40);
    let first = zone.take().unwrap();
    zone.hold(21);
    zone.hold(30);
    zone.settle(30);
    assert_eq!(zone.plan_pack(u64::MAX), [Shift { from: 30, to: 1 }]);
    zone.settle(21);
    assert_eq!(pack(&mut zone, 1), [Shift { from: 30, to: 1 }]);
    assert_eq!(pack(&mut zone, 1), [Shift { from: 21, to: 2 }]);
    assert_eq!((zone.refs(first), zone.refs(1), zone.refs(2)), (1, 1, 1));
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Grow(u8),
    Take(u8),
    AddRef(u8),
    DropRef(u8),
    Release(u8, u8),
    Pack(u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        2 => any::<u8>().prop_map(|n| Step::Grow(n % 16)),
        6 => any::<u8>().prop_map(Step::Take),
        1 => any::<u8>().prop_map(Step::AddRef),
        5 => any::<u8>().prop_map(Step::DropRef),
        1 => any::<(u8, u8)>().prop_map(|(bytes, blocks)| Step::Release(bytes % 4, blocks % 8)),
        2 => any::<u8>().prop_map(|n| Step::Pack(n % 16)),
    ];
    prop::collection::vec(step, 0..150)
}

proptest! {
    #[test]
    fn no_block_is_handed_out_twice_and_the_figures_hold(
        (block, chunk) in (1_u64..40, 1_u64..40),
        first_block in prop_oneof![Just(0_u32), 1_u32..50],
        steps in steps(),
    ) {
        let mut zone = Zone::new(geometry(block, chunk, first_block, 60));
        // Who has what: a block is there as often as somebody has it.
        let mut held: Vec<u32> = Vec::new();
        for step in steps {
            let pick = |n: u8, held: &Vec<u32>| held.get(usize::from(n) % held.len().max(1)).copied();
            match step {
                Step::Grow(blocks) => {
                    let (free, lacking) = (zone.free_blocks(), zone.lacking_blocks());
                    let plan = grow(&mut zone, blocks.into());
                    prop_assert_eq!(plan.blocks, lacking.min(blocks.into()));
                    prop_assert!(zone.free_blocks() >= free + plan.blocks);
                }
                Step::Take(blocks) => for _ in 0..blocks % 8 {
                    let Some(block) = zone.take() else { break };
                    prop_assert!(!held.contains(&block), "{} is somebody's", block);
                    held.push(block);
                },
                Step::AddRef(n) => if let Some(block) = pick(n, &held) {
                    zone.add_ref(block);
                    held.push(block);
                },
                Step::DropRef(n) => if let Some(block) = pick(n, &held) {
                    held.swap_remove(held.iter().position(|it| *it == block).unwrap());
                    zone.drop_ref(block);
                    prop_assert_eq!(zone.refs(block) == 0, !held.contains(&block));
                },
                Step::Release(chunks, blocks) => {
                    let (keep_bytes, keep_blocks) = (u64::from(chunks) * chunk * UNIT, u64::from(blocks));
                    let (empty, free) = (zone.empty_bytes(), zone.free_blocks());
                    release(&mut zone, keep_bytes, keep_blocks);
                    prop_assert!(zone.empty_bytes() >= keep_bytes.min(empty));
                    prop_assert!(zone.free_blocks() >= keep_blocks.min(free));
                }
                Step::Pack(max) => {
                    let spare = zone.spare_bytes();
                    let shifts = zone.plan_pack(max.into());
                    prop_assert!(shifts.len() <= max.into());
                    for Shift { from, to } in &shifts {
                        prop_assert!(!held.contains(to), "{} is somebody's", to);
                        zone.hold(*to);
                        zone.hold(*from);
                    }
                    // Its last owner may go meanwhile.
                    let gone = shifts.first().map(|shift| shift.from).filter(|_| max % 3 == 0);
                    if let Some(from) = gone {
                        held.retain(|it| *it != from);
                        (0..zone.refs(from)).for_each(|_| zone.drop_ref(from));
                        prop_assert_eq!(zone.owned_blocks(), held.iter().collect::<HashSet<_>>().len() as u64);
                    }
                    for shift in shifts {
                        zone.hand_over(shift);
                        for it in held.iter_mut().filter(|it| **it == shift.from) {
                            *it = shift.to;
                        }
                    }
                    prop_assert!(zone.spare_bytes() >= spare);
                }
            }
            let mut refs = vec![0; 60];
            held.iter().for_each(|block| refs[(block - first_block) as usize] += 1);
            prop_assert_eq!(zone.verify(&refs), Ok(()));
        }
        held.iter().for_each(|block| zone.drop_ref(*block));
        release(&mut zone, 0, 0);
        prop_assert_eq!((zone.standing_bytes(), zone.owned_blocks()), (0, 0));
    }
}
