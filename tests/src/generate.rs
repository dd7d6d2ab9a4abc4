//! Random scripts: the setups and the actions that a seed stands for.

mod elastic;
mod faults;
mod requests;

use vmm_pool::Placement;
use vmm_sys::CaptureMode;

use elastic::Elastics;
use requests::Sizes;

use crate::action::Action;
use crate::rng::Rng;
use crate::script::Script;
use crate::setup::Setup;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// What kind of run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// Nothing goes wrong at the driver, and no thread runs beside.
    Plain,
    /// Driver calls fail.
    Faulty,
    /// The pool has its background thread.
    Background,
    /// Memory is asked for and freed by plain address.
    Raw,
    /// As `Raw`, and every pool is in guard mode.
    Guard,
    /// Streams are captured, and their graphs launched; one stream is the running thread's own.
    Capture,
    /// Elastic buffers over several devices, beside what lanes do.
    Elastic,
    /// The same, and driver calls fail.
    ElasticFaulty,
    /// As `Elastic`, and the pool has its background thread.
    ElasticBackground,
}

impl Profile {
    /// Whether there are elastic buffers.
    pub fn is_elastic(self) -> bool {
        matches!(self, Profile::Elastic | Profile::ElasticFaulty | Profile::ElasticBackground)
    }

    fn is_faulty(self) -> bool {
        matches!(self, Profile::Faulty | Profile::ElasticFaulty)
    }
}

/// The run of a seed.
pub fn script(profile: Profile, seed: u64) -> Script {
    let mut rng = Rng::new(seed);
    let mut setup = setup(profile, &mut rng);
    if profile.is_elastic() {
        elastic::make_room(&mut setup, &mut rng);
    }
    // Short runs cover many setups, long ones get a pool into deep states.
    let steps = rng.weighted(&[(60, 60), (30, 150), (10, 500)]);
    let mut generator = Generator::new(profile, &setup, rng);
    let actions = (0..steps).map(|step| generator.action(step)).collect();
    Script { setup, actions }
}

fn setup(profile: Profile, rng: &mut Rng) -> Setup {
    let granularities = [(60, 2 * MIB), (15, 64 * KIB), (15, 4 * KIB), (10, 512 * MIB)];
    let granularity_bytes = rng.weighted(&granularities);
    let huge = granularity_bytes > 32 * MIB;
    let chunks = [None, Some(2 * MIB), Some(32 * MIB)];
    let chunk_bytes = if huge { None } else { rng.pick(&chunks) };
    let limit_bytes = rng.chance(500).then(|| match huge {
        true => rng.pick(&[1, 2, 4]) * granularity_bytes + rng.below(granularity_bytes),
        false => 4 * MIB + rng.below(150 * MIB),
    });
    // A small device makes the driver refuse instead of the limit.
    let device_bytes = match (huge, rng.chance(150)) {
        (true, _) => 8 * GIB,
        (false, true) => rng.pick(&[64, 128, 250]) * MIB,
        (false, false) => 16 * GIB,
    };
    let stocked = limit_bytes.is_none() && !huge && device_bytes > GIB && rng.chance(200);
    let stock_low_bytes = if stocked { rng.below(70 * MIB) } else { 0 };
    let high_bytes = stock_low_bytes + rng.below(64 * MIB);
    Setup {
        devices: 1 + u32::from(rng.chance(300)),
        granularity_bytes,
        device_bytes,
        modelled_time: rng.chance(300),
        chunk_bytes,
        placement: rng.pick(&[Placement::Buddy, Placement::FirstFit]),
        soft_limit: rng.pick(&[None, Some(0.01), Some(0.0)]),
        limit_bytes,
        stock_low_bytes,
        stock_high_bytes: rng.chance(200).then_some(high_bytes),
        background: matches!(profile, Profile::Background | Profile::ElasticBackground),
        guard: profile == Profile::Guard,
        idle_lane_ms: rng.pick(&[None, Some(1), Some(100)]),
        host_bytes: None,
    }
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Stream,
    Alloc,
    Free,
    Record,
    Use,
    Check,
    Hold,
    Release,
    Busy,
    Trim,
    TrimIdle,
    Later,
    Prefill,
    CloseLane,
    Capture,
    EndCapture,
    Scope,
    Join,
    Finish,
    Launch,
    DropGraph,
    ResetPeaks,
    DropPool,
    Fault,
    ClearFaults,
    Elastic,
}

const KINDS: &[(u64, Kind)] = &[
    (20, Kind::Stream),
    (360, Kind::Alloc),
    (280, Kind::Free),
    (20, Kind::Record),
    (90, Kind::Use),
    (40, Kind::Check),
    (35, Kind::Hold),
    (50, Kind::Release),
    (30, Kind::Busy),
    (25, Kind::Trim),
    (10, Kind::TrimIdle),
    (40, Kind::Later),
    (10, Kind::Prefill),
    (10, Kind::CloseLane),
    (6, Kind::ResetPeaks),
    (4, Kind::DropPool),
];

/// Not where calls fail: the test's own calls may be among them, and would harm the capture.
const CALM_KINDS: &[(u64, Kind)] = &[(8, Kind::Capture), (8, Kind::EndCapture)];

const CAPTURE_KINDS: &[(u64, Kind)] = &[
    (30, Kind::Scope),
    (20, Kind::Join),
    (30, Kind::Finish),
    (45, Kind::Launch),
    (12, Kind::DropGraph),
];

/// Graphs that a run has at once, open captures among them.
const GRAPHS_MAX: usize = 4;

const FAULTY_KINDS: &[(u64, Kind)] = &[(60, Kind::Fault), (40, Kind::ClearFaults)];

/// As often as everything else together.
const ELASTIC_KINDS: &[(u64, Kind)] = &[(1100, Kind::Elastic)];

struct Generator {
    rng: Rng,
    kinds: Vec<(u64, Kind)>,
    sizes: Sizes,
    devices: u32,
    granularity_bytes: u64,
    large_max_bytes: u64,
    /// Buffers that are probably alive, oldest first.
    live: Vec<u32>,
    next_buffer: u32,
    streams: u32,
    live_max: usize,
    profile: Profile,
    /// Graphs that are probably there, open captures among them.
    graphs: Vec<u32>,
    next_graph: u32,
    elastics: Elastics,
}

impl Generator {
    fn new(profile: Profile, setup: &Setup, mut rng: Rng) -> Generator {
        let mut kinds = KINDS.to_vec();
        kinds.extend(if profile.is_faulty() { FAULTY_KINDS } else { CALM_KINDS });
        if profile == Profile::Capture {
            kinds.extend(CAPTURE_KINDS);
        }
        if profile.is_elastic() {
            kinds.extend(ELASTIC_KINDS);
        }
        let limit_bytes = setup.limit_bytes.unwrap_or(u64::MAX).min(setup.device_bytes);
        Generator {
            kinds,
            sizes: rng.pick(&[Sizes::Small, Sizes::Large, Sizes::Mixed, Sizes::Mixed]),
            devices: setup.devices,
            granularity_bytes: setup.granularity_bytes,
            large_max_bytes: (limit_bytes / 2).clamp(8 * MIB, 48 * MIB),
            live: Vec::new(),
            next_buffer: 0,
            streams: 0,
            live_max: rng.pick(&[4, 12, 40, 120]),
            profile,
            graphs: Vec::new(),
            next_graph: 0,
            elastics: Elastics::default(),
            rng,
        }
    }

    fn action(&mut self, step: usize) -> Action {
        // Something to work on first: a stream of each device.
        if step < self.devices as usize {
            return self.stream(step as u32);
        }
        if let Some(action) = self.due() {
            return action;
        }
        match self.rng.weighted(&self.kinds) {
            Kind::Stream => {
                let device = self.rng.below(u64::from(self.devices)) as u32;
                if self.streams < 5 { self.stream(device) } else { self.alloc() }
            }
            Kind::Alloc if self.live.len() < self.live_max => self.alloc(),
            Kind::Alloc | Kind::Free => self.free(),
            Kind::Record => Action::Record { buffer: self.buffer(), stream: self.some_stream() },
            Kind::Use => Action::Use { buffer: self.buffer(), stream: self.some_stream() },
            Kind::Check => Action::Check { buffer: self.buffer() },
            Kind::Hold => Action::Hold { stream: self.some_stream() },
            Kind::Release => Action::Release { stream: self.some_stream() },
            Kind::Busy => {
                let us = 1 + self.rng.below(500);
                Action::Busy { stream: self.some_stream(), us }
            }
            Kind::Trim => Action::Trim { device: self.device() },
            Kind::TrimIdle => {
                let ms = self.rng.pick(&[0, 30, 100, 1000]);
                Action::TrimIdle { device: self.device(), ms }
            }
            Kind::Later => Action::Later { ms: self.rng.pick(&[1, 20, 60, 300]) },
            Kind::Prefill => {
                let bytes = 1 + self.rng.below(40 * MIB);
                Action::Prefill { device: self.device(), bytes }
            }
            Kind::CloseLane => Action::CloseLane { stream: self.some_stream() },
            Kind::Capture => Action::Capture { device: self.device() },
            Kind::EndCapture => Action::EndCapture { device: self.device() },
            Kind::Scope => self.scope(),
            Kind::Join => Action::Join { graph: self.graph(), stream: self.some_stream() },
            Kind::Finish => Action::Finish { graph: self.graph() },
            Kind::Launch => Action::Launch { graph: self.graph(), stream: self.some_stream() },
            Kind::DropGraph => self.drop_graph(),
            Kind::ResetPeaks => Action::ResetPeaks,
            Kind::DropPool => Action::DropPool,
            Kind::Elastic => self.elastic(),
            Kind::Fault => self.fault(),
            Kind::ClearFaults => Action::ClearFaults,
        }
    }

    fn stream(&mut self, device: u32) -> Action {
        self.streams += 1;
        let own = self.profile == Profile::Capture && self.rng.chance(300);
        Action::Stream { stream: self.streams - 1, device, own }
    }

    fn alloc(&mut self) -> Action {
        let buffer = self.next_buffer;
        self.next_buffer += 1;
        self.live.push(buffer);
        let bytes = self.bytes();
        let align = self.align();
        let wait = self.rng.chance(850);
        let raw = matches!(self.profile, Profile::Raw | Profile::Guard) && self.rng.chance(600);
        Action::Alloc { buffer, stream: self.some_stream(), bytes, align, wait, raw }
    }

    fn free(&mut self) -> Action {
        if self.live.is_empty() {
            return self.alloc();
        }
        // The newest or the oldest more often than any other: stacks and queues.
        let index = match self.rng.below(4) {
            0 => 0,
            1 => self.live.len() - 1,
            _ => self.rng.below(self.live.len() as u64) as usize,
        };
        let elsewhere = self.profile == Profile::Capture && self.rng.chance(150);
        Action::Free { buffer: self.live.remove(index), elsewhere }
    }

    fn scope(&mut self) -> Action {
        if self.graphs.len() >= GRAPHS_MAX {
            return self.drop_graph();
        }
        let graph = self.next_graph;
        self.next_graph += 1;
        self.graphs.push(graph);
        let modes = [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];
        Action::Scope { graph, stream: self.some_stream(), mode: self.rng.pick(&modes) }
    }

    fn drop_graph(&mut self) -> Action {
        if self.graphs.is_empty() {
            return Action::DropGraph { graph: 0 };
        }
        let index = self.rng.below(self.graphs.len() as u64) as usize;
        Action::DropGraph { graph: self.graphs.remove(index) }
    }

    fn graph(&mut self) -> u32 {
        match self.graphs.as_slice() {
            [] => 0,
            graphs => self.rng.pick(graphs),
        }
    }

    fn buffer(&mut self) -> u32 {
        match self.live.as_slice() {
            [] => 0,
            live => self.rng.pick(live),
        }
    }

    fn some_stream(&mut self) -> u32 {
        self.rng.below(u64::from(self.streams.max(1))) as u32
    }

    fn device(&mut self) -> u32 {
        self.rng.below(u64::from(self.devices)) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_is_the_script_and_the_script_is_its_text() {
        let profiles = [
            Profile::Plain,
            Profile::Faulty,
            Profile::Background,
            Profile::Raw,
            Profile::Guard,
            Profile::Capture,
            Profile::Elastic,
            Profile::ElasticFaulty,
            Profile::ElasticBackground,
        ];
        for profile in profiles {
            for seed in 0..50 {
                let script = script(profile, seed);
                assert_eq!(script, super::script(profile, seed));
                assert_eq!(script.to_string().parse(), Ok(script));
            }
        }
    }
}
