//! Who goes on: random, but not evenly so.

use shuttle::scheduler::{Schedule, Scheduler, Task, TaskId};

use crate::rng::Rng;

/// One execution's choices, all from one seed.
///
/// Some runs change threads at almost every step, others seldom; now and then one thread stands still for
/// long, which finds what needs others to come by in between.
pub(crate) struct Chances {
    seed: u64,
    rng: Rng,
    has_run: bool,
    /// Chance in 1000 that whoever runs goes on.
    stay_per_mille: u64,
    /// Who stands still, and for how many more choices.
    stands: Option<(TaskId, u64)>,
}

impl Chances {
    pub(crate) fn new(seed: u64) -> Chances {
        let mut rng = Rng::new(seed ^ 0x5C4E_D01E);
        let stay_per_mille = rng.pick(&[0, 500, 800, 950]);
        Chances { seed, rng, has_run: false, stay_per_mille, stands: None }
    }
}

impl Scheduler for Chances {
    fn new_execution(&mut self) -> Option<Schedule> {
        let first = !std::mem::replace(&mut self.has_run, true);
        first.then(|| Schedule::new(self.seed))
    }

    fn next_task(
        &mut self,
        runnable: &[&Task],
        current: Option<TaskId>,
        is_yielding: bool,
    ) -> Option<TaskId> {
        if let Some((_, left)) = &mut self.stands {
            *left -= 1;
            if *left == 0 {
                self.stands = None;
            }
        }
        let still = self.stands.map(|(task, _)| task);
        // Who asks to let others go first spins, perhaps for one that stands still: then anybody may.
        let waits = |id: TaskId| Some(id) == still || is_yielding && Some(id) == current;
        let mut free: Vec<TaskId> = runnable.iter().map(|task| task.id()).collect();
        if free.iter().any(|id| !waits(*id)) {
            free.retain(|id| !waits(*id));
        }
        let stays = self.rng.chance(self.stay_per_mille);
        if let Some(current) = current.filter(|it| stays && free.contains(it)) {
            return Some(current);
        }
        let next = free[self.rng.below(free.len() as u64) as usize];
        if self.stands.is_none() && self.rng.chance(2) {
            self.stands = Some((next, 1 + self.rng.below(3000)));
        }
        Some(next)
    }

    fn next_u64(&mut self) -> u64 {
        self.rng.next_u64()
    }
}
