//! Lanes of one pool side by side: how often a request of one looks into another under its lock. Counts,
//! found in one thread: what threads would pay in time.
use crate::common::{HOME, MIB, Rig};
use vmm_pool::{Buffer, ChunkSize, Lane};
use vmm_sys::Call;
use vmm_sys::object::Stream;

/// The mix of the thread benchmark (`benches/src/mix.rs`).
const SIZES: [u64; 7] = [512, 2048, 8192, 65_536, 262_144, 1 << 20, 4 << 20];

struct Mix {
    lane: Lane,
    blocks: Vec<Buffer>,
    random: u64,
}

impl Mix {
    fn of(rig: &Rig, stream: &Stream, seed: u64) -> Mix {
        let random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Mix { lane: rig.pool.lane(stream).unwrap(), blocks: Vec::new(), random }
    }

    fn next(&mut self) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 32) as usize
    }

    fn step(&mut self) {
        let live = self.blocks.len();
        if live < 64 || (self.next() & 1 == 1 && live < 128) {
            let bytes = SIZES[self.next() % SIZES.len()];
            self.blocks.push(self.lane.alloc(bytes).unwrap());
        } else {
            let victim = self.next() % live;
            self.blocks.swap_remove(victim);
        }
    }
}

fn streams(rig: &Rig, count: usize) -> Vec<Stream> {
    (0..count).map(|_| Stream::create(&rig.driver, HOME).unwrap()).collect()
}

/// Each look brings a chunk, or almost: lanes that are not needed are not looked into.
#[test]
fn a_look_into_another_lane_brings_memory() {
    for lanes in [2, 4, 16] {
        let rig = Rig::new(|builder| builder);
        let streams = streams(&rig, lanes);
        let mut mixes: Vec<Mix> =
            streams.iter().zip(1..).map(|(stream, seed)| Mix::of(&rig, stream, seed)).collect();
        let mut run = |steps: u32| {
            let asked = rig.stats().lanes_asked;
            let calls = rig.calls(|| (0..steps).for_each(|_| mixes.iter_mut().for_each(Mix::step)));
            (rig.stats().lanes_asked - asked, calls.of(Call::MemUnmap))
        };
        // While all lanes grow, one may be asked in vain.
        let (grown, settled) = (run(50_000), run(50_000));
        println!("{lanes} lanes, looks and chunks that moved: {grown:?}, then {settled:?}");
        assert!(grown.0 <= grown.1 && settled.0 <= settled.1, "{lanes}: {grown:?} {settled:?}");
        drop((mixes, streams));
        rig.end();
    }
}

#[test]
fn lanes_that_have_nothing_to_give_are_left_alone() {
    let rig = Rig::new(|b| b.chunk(ChunkSize::Fixed(2 * MIB)).soft_limit(Some(0.0)));
    let streams = streams(&rig, 15);
    let mut buffers = Vec::new();
    for stream in &streams {
        let lane = rig.pool.lane(stream).unwrap();
        // Less than a chunk is free in each.
        buffers.extend([lane.alloc(3 * MIB).unwrap(), lane.alloc(MIB / 2).unwrap()]);
    }
    for _ in 0..64 {
        // Beyond the limit each time, as far as is known before the others' figures are read.
        buffers.push(rig.lane.alloc(2 * MIB).unwrap());
    }
    assert_eq!(rig.stats().lanes_asked, 0);
    // One has something now, and only that one is looked into.
    buffers.drain(..2);
    buffers.push(rig.lane.alloc(4 * MIB).unwrap());
    assert_eq!(rig.stats().lanes_asked, 1);
    drop((buffers, streams));
    rig.end();
}
