//! Where rows are run: a driver, the devices under test, and what the runner offers beside them.

use std::fmt;
use std::process::Command;
use std::sync::Arc;

use crate::caught::thrown;
use crate::driver::Driver;
use crate::error::DriverResult;
use crate::types::{ChunkProps, DeviceId, GranularityKind};

use super::outcome::{Outcome, Step, Stop};
use super::row::Row;
use super::scratch::Scratch;
use super::second::Second;

type Fresh = dyn Fn() -> DriverResult<Arc<dyn Driver>> + Send + Sync;
type Isolation = dyn Fn(&Row, usize) -> Outcome + Send + Sync;
type SecondProcess = dyn Fn() -> Command + Send + Sync;
type Voice = dyn Fn(&str) + Send + Sync;

/// A driver with one or two devices to run rows on. Holds one reference to the primary context of
/// each, so that no row pays for making one.
pub struct Bench {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    second_device: Option<DeviceId>,
    retained: Vec<DeviceId>,
    granularity: u64,
    case: usize,
    /// The running row may leave its context broken: what follows from that is no news.
    may_break: bool,
    fresh: Option<Arc<Fresh>>,
    isolation: Option<Arc<Isolation>>,
    second_process: Option<Arc<SecondProcess>>,
    voice: Option<Arc<Voice>>,
}

impl Bench {
    /// A bench on `device`; its neighbour by ordinal, if there is one, is the second device.
    ///
    /// # Errors
    /// When the driver does not know the device, or has no memory left for its context.
    pub fn new(driver: Arc<dyn Driver>, device: DeviceId) -> DriverResult<Bench> {
        let count = driver.device_count()?;
        let second_device = (count > 1).then(|| DeviceId((device.0 + 1) % count));
        let mut bench = Bench {
            driver,
            device,
            second_device,
            retained: Vec::new(),
            granularity: 0,
            case: 0,
            may_break: false,
            fresh: None,
            isolation: None,
            second_process: None,
            voice: None,
        };
        for device in [Some(device), second_device].into_iter().flatten() {
            bench.driver.primary_context_retain(device)?;
            bench.retained.push(device);
        }
        let props = ChunkProps::on_device(device);
        bench.granularity = bench.driver.granularity(&props, GranularityKind::Minimum)?;
        Ok(bench)
    }

    /// Offers drivers that one row can have to itself: how a simulated driver is offered for rows
    /// that break their context.
    #[must_use]
    pub fn with_fresh(
        mut self,
        fresh: impl Fn() -> DriverResult<Arc<dyn Driver>> + Send + Sync + 'static,
    ) -> Bench {
        self.fresh = Some(Arc::new(fresh));
        self
    }

    /// Offers a place outside this process for one case of a row, usually by
    /// [`super::run_in_child`]: how a GPU is offered for rows that break their context.
    #[must_use]
    pub fn with_isolation(
        mut self,
        isolation: impl Fn(&Row, usize) -> Outcome + Send + Sync + 'static,
    ) -> Bench {
        self.isolation = Some(Arc::new(isolation));
        self
    }

    /// Offers a second process: a command that opens the same kind of driver and then calls
    /// [`super::serve_second_process`] on its standard input.
    #[must_use]
    pub fn with_second_process(
        mut self,
        command: impl Fn() -> Command + Send + Sync + 'static,
    ) -> Bench {
        self.second_process = Some(Arc::new(command));
        self
    }

    /// Hears what a row that may hang or crash is about to do: its last words.
    #[must_use]
    pub fn with_voice(mut self, voice: impl Fn(&str) + Send + Sync + 'static) -> Bench {
        self.voice = Some(Arc::new(voice));
        self
    }

    /// The driver under test.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// A driver that nothing else uses, if the runner offers one.
    pub fn fresh(&self) -> Option<DriverResult<Arc<dyn Driver>>> {
        self.fresh.as_ref().map(|fresh| fresh())
    }

    /// The device under test.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Its neighbour, if there is one.
    pub fn second_device(&self) -> Option<DeviceId> {
        self.second_device
    }

    /// The minimum granularity of chunks on the device under test, in bytes.
    pub fn granularity(&self) -> u64 {
        self.granularity
    }

    /// Which case of its row is being run.
    pub(crate) fn case(&self) -> usize {
        self.case
    }

    /// Tells the voice, if there is one, what comes next.
    pub(crate) fn say(&self, text: &str) {
        if let Some(voice) = &self.voice {
            voice(text);
        }
    }

    pub(crate) fn has_second_process(&self) -> bool {
        self.second_process.is_some()
    }

    /// Starts the second process; rows that need one are not run without.
    pub(crate) fn second_process(&self) -> Step<Second> {
        match &self.second_process {
            Some(command) => Ok(Second::start(command())?),
            None => Err(Stop::Skipped("the runner starts no second process".into())),
        }
    }

    /// Runs a row, each case of it in a place of its own if the row asks for that.
    pub fn run(&self, row: &Row) -> Outcome {
        if let Err(stop) = row.needs.met_by(self) {
            return stop.into();
        }
        let kind = self.driver.kind();
        let outcomes = row.cases.iter().enumerate().map(|(index, case)| {
            let outcome = match case.missing(kind) {
                Some(reason) => Outcome::Skipped(reason),
                None if row.needs.own_driver => self.run_apart(row, index),
                None => self.run_case_here(row, index),
            };
            (case.name, outcome)
        });
        Outcome::of_cases(outcomes.collect())
    }

    fn run_apart(&self, row: &Row, case: usize) -> Outcome {
        if let Some(isolation) = &self.isolation {
            return isolation(row, case);
        }
        let Some(fresh) = self.fresh() else {
            return Outcome::Skipped("needs a driver of its own, and the runner has none".into());
        };
        match fresh.and_then(|driver| Bench::new(driver, self.device)) {
            Ok(mut bench) => {
                bench.second_process.clone_from(&self.second_process);
                bench.run_case_here(row, case)
            }
            Err(error) => Outcome::Failed(format!("no fresh driver: {error}")),
        }
    }

    /// Runs one case of a row on this very driver, whatever the row needs: what a child process
    /// does. A panic in it is a failure of the row, not of the suite.
    pub fn run_case_here(&self, row: &Row, case: usize) -> Outcome {
        let bench = Bench {
            driver: Arc::clone(&self.driver),
            // References stay with `self`.
            retained: Vec::new(),
            case,
            may_break: row.needs.own_driver,
            fresh: self.fresh.clone(),
            isolation: self.isolation.clone(),
            second_process: self.second_process.clone(),
            voice: self.voice.clone(),
            ..*self
        };
        thrown(|| (row.run)(&bench))
            .unwrap_or_else(|words| Outcome::Failed(format!("the row panicked: {words}")))
    }

    /// Runs the body of a checking row, and gives back what it made.
    pub(crate) fn check(&self, body: impl FnOnce(&Scratch<'_>) -> Step<String>) -> Outcome {
        match self.with_scratch(body) {
            Ok(note) => Outcome::Passed(note),
            Err(stop) => stop.into(),
        }
    }

    /// Runs the body of an observing row: its text is what came.
    pub(crate) fn observe(&self, body: impl FnOnce(&Scratch<'_>) -> Step<String>) -> Outcome {
        match self.check(body) {
            Outcome::Passed(text) => Outcome::Observed(text),
            other => other,
        }
    }

    fn with_scratch(&self, body: impl FnOnce(&Scratch<'_>) -> Step<String>) -> Step<String> {
        let scratch = Scratch::new(self);
        let note = body(&scratch)?;
        let trouble = scratch.clean_up();
        if trouble.is_empty() || self.may_break {
            Ok(note)
        } else {
            Err(Stop::Failed(format!("passed, but cleaning up: {}", trouble.join("; "))))
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        for device in self.retained.drain(..) {
            // A context that a row broke cannot be given back cleanly, and the process ends soon.
            let _ = self.driver.primary_context_release(device);
        }
    }
}

impl fmt::Debug for Bench {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bench")
            .field("driver", &self.driver.kind())
            .field("device", &self.device)
            .field("second_device", &self.second_device)
            .field("granularity", &self.granularity)
            .field("case", &self.case)
            .finish_non_exhaustive()
    }
}
