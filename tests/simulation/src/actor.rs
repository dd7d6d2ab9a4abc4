//! [`Actor`]: one thread of a run, and what it does.

use std::sync::Arc;
use std::time::Duration;

use vmm_pool::{Migration, Place};
use vmm_sys::object::Stream;
use vmm_sys::{DeviceId, ResultCode};

use crate::blocks::Block;
use crate::caches::Held;
use crate::coverage::Outcome;
use crate::faults;
use crate::graphs::Graph;
use crate::part::Part;
use crate::rng::Rng;
use crate::world::{SLOTS_EACH, World};

/// What actors do: weight and name. Some names are parts of an operation, and have no weight.
pub(crate) const OPERATIONS: &[(u64, &str)] = &[
    (14, "alloc"),
    (0, "alloc a plain address"),
    (0, "lane"),
    (6, "touch"),
    (0, "record a stream"),
    (3, "look"),
    (0, "read"),
    (7, "free"),
    (0, "free a plain address"),
    (2, "offer"),
    (3, "take"),
    (3, "capture"),
    (0, "alloc in a capture"),
    (4, "launch"),
    (2, "drop a graph"),
    (8, "commit"),
    (0, "commit from a place"),
    (0, "grow and borrow"),
    (0, "grow"),
    (0, "ask to grow ahead"),
    (0, "grow ahead"),
    (3, "decommit"),
    (0, "shrink"),
    (10, "use"),
    (4, "copy"),
    (2, "share"),
    (1, "unshare"),
    (5, "move"),
    (0, "ask to move"),
    (0, "move in the background"),
    (1, "come home"),
    (3, "sleep"),
    (0, "sleep by tag"),
    (4, "wake"),
    (0, "wake by tag"),
    (4, "recall"),
    (0, "give back"),
    (1, "rebalance"),
    (1, "grant"),
    (0, "revoke"),
    (4, "export"),
    (8, "use a cache"),
    (0, "open a sequence"),
    (0, "append tokens"),
    (0, "fork a sequence"),
    (0, "cut a sequence"),
    (0, "drop a sequence"),
    (2, "hold a stream"),
    (3, "keep a stream busy"),
    (2, "trim"),
    (2, "trim idle memory"),
    (1, "prefill"),
    (1, "close a lane"),
    (2, "verify"),
    (4, "inject a fault"),
    (2, "end the faults"),
    (1, "lose a context"),
];

pub(crate) struct Actor {
    pub(crate) number: usize,
    pub(crate) world: Arc<World>,
    pub(crate) rng: Rng,
    /// Its own stream, where it captures.
    pub(crate) own: Stream,
    pub(crate) blocks: Vec<Block>,
    pub(crate) graphs: Vec<Graph>,
    pub(crate) parts: Vec<Part>,
    pub(crate) migrations: Vec<Migration>,
    pub(crate) sequences: Vec<Held>,
}

impl Actor {
    pub(crate) fn new(number: usize, world: Arc<World>, seed: u64) -> Actor {
        let mut rng = Rng::new(seed.wrapping_mul(31).wrapping_add(number as u64 + 1));
        let device = DeviceId(rng.below(world.setup.devices.into()) as u32);
        let own = Stream::create(&world.driver, device).expect("a stream is made");
        let first = number as u64 * SLOTS_EACH;
        let mut parts: Vec<Part> =
            world.shared.iter().map(|it| Part::new(it.clone(), first, SLOTS_EACH, false)).collect();
        parts.push(Part::new(world.own[number].clone(), 0, SLOTS_EACH, true));
        let (blocks, graphs, migrations, sequences) = Default::default();
        Actor { number, world, rng, own, blocks, graphs, parts, migrations, sequences }
    }

    /// Everything, in the order that its seed says.
    pub(crate) fn act(&mut self) {
        for _ in 0..self.world.setup.steps {
            let operation = self.rng.weighted(OPERATIONS);
            self.say(&format!("begins to {operation}"));
            self.step(operation);
            self.check_figures();
            if self.world.is_lost() {
                return;
            }
        }
    }

    fn step(&mut self, operation: &str) {
        match operation {
            "alloc" => self.alloc(),
            "touch" => self.touch(),
            "look" => self.look(),
            "free" => self.free(),
            "offer" => self.offer(),
            "take" => self.take(),
            "capture" => self.capture(),
            "launch" => self.launch(),
            "drop a graph" => self.drop_graph(),
            "commit" => self.commit(),
            "decommit" => self.decommit(),
            "use" => self.use_slots(),
            "copy" => self.copy_slot(),
            "share" => self.share(),
            "unshare" => self.unshare(),
            "move" => self.migrate(),
            "come home" => self.come_home(),
            "sleep" => self.sleep(),
            "wake" => self.wake(),
            "recall" => self.recall(),
            "rebalance" => self.rebalance(),
            "grant" => self.grant(),
            "export" => self.export(),
            "use a cache" => self.cache(),
            _ => self.disturb(operation),
        }
    }

    /// What is done to the pool or the machine as a whole.
    fn disturb(&mut self, operation: &str) {
        let world = self.world.clone();
        let at = self.rng.below(world.streams.len() as u64) as usize;
        let stream = &world.streams[at];
        let (device, handle) = (stream.device(), stream.handle());
        match operation {
            "hold a stream" => {
                if let Some(hold) = self.drive("a hold", world.sim.hold(device, handle)) {
                    world.note_hold(hold);
                    self.came_out("hold a stream", Outcome::Done, "done");
                }
            }
            "keep a stream busy" => {
                let us = 1 + self.rng.below(500);
                self.drive("busy work", world.sim.keep_busy(device, handle, us));
                self.came_out("keep a stream busy", Outcome::Done, "done");
            }
            "trim" => drop(self.judge("trim", world.pool.trim(device), &[])),
            "trim idle memory" => {
                let idle = Duration::from_millis(self.rng.pick(&[0, 20, 100]));
                self.judge("trim idle memory", world.pool.trim_idle(device, idle), &[]);
            }
            "prefill" => {
                let place = self.any_place();
                let unit = match place {
                    Place::Device(_) => world.setup.chunk_bytes,
                    Place::HostNuma(_) => world.setup.slot_bytes,
                };
                let bytes = unit * (1 + self.rng.below(4));
                self.judge("prefill", world.pool.prefill(place, bytes), &[]);
            }
            "close a lane" => {
                world.pool.close_lane(stream);
                self.came_out("close a lane", Outcome::Done, "done");
            }
            "verify" => {
                if let Err(wrong) = world.pool.verify() {
                    panic!("actor {}: the pool is not sound: {wrong}", self.number);
                }
                self.feature("checks of everything");
                self.came_out("verify", Outcome::Done, "done");
            }
            "inject a fault" if world.setup.faulty => {
                let (plan, text) = faults::plan(&mut self.rng);
                world.sim.inject(plan);
                self.came_out("inject a fault", Outcome::Done, &text);
            }
            "end the faults" if world.setup.faulty => {
                world.sim.clear_faults();
                self.came_out("end the faults", Outcome::Done, "done");
            }
            "lose a context" if world.setup.may_lose && self.rng.chance(300) => {
                world.lose();
                world.sim.lose_context(device, ResultCode::ILLEGAL_ADDRESS);
                self.feature("contexts lost");
                self.came_out("lose a context", Outcome::Done, "done");
            }
            _ => {}
        }
    }

    /// What holds at any moment.
    fn check_figures(&self) {
        if let Some(wrong) = self.world.notes.first_wrong() {
            panic!("{wrong}");
        }
        for (device, stats) in self.world.pool.stats().devices {
            assert!(stats.adds_up(), "{device}: {stats:?}");
            assert!(stats.held_bytes <= stats.limit_bytes, "{device}: {stats:?}");
        }
    }

    pub(crate) fn say(&self, what: &str) {
        let ns = self.world.sim.now_ns();
        self.world.notes.line(format!("{ns:>12} ns, actor {}: {what}", self.number));
    }

    pub(crate) fn came_out(&self, operation: &'static str, outcome: Outcome, how: &str) {
        self.say(&format!("{operation}: {how}"));
        self.world.notes.cover(|coverage| coverage.operation(operation, outcome));
    }

    pub(crate) fn feature(&self, name: &'static str) {
        self.world.notes.cover(|coverage| coverage.feature(name));
    }
}
