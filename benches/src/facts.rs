//! The machine that a figure was measured on. A figure without it is worth nothing.

use std::fmt;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use vmm_pool_cli::replay::Cause;
use vmm_sys::{DeviceId, Driver};

/// Sets the date of the records (`YYYY-MM-DD`) on a machine whose clock is wrong.
pub const DATE_VAR: &str = "VMM_BENCH_DATE";
/// Names the commit on a machine that has the programs but not the repository.
pub const COMMIT_VAR: &str = "VMM_BENCH_COMMIT";

/// What every record carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// The day, UTC.
    pub date: String,
    /// The commit that was built, if it is known.
    pub commit: Option<String>,
    /// The processor's own name.
    pub cpu: String,
    /// Hardware threads that this process may use (count).
    pub cores: usize,
    /// The kernel.
    pub os: String,
    /// `cuda` or `sim`.
    pub driver: String,
    /// `cuDriverGetVersion`: 1000 x major + 10 x minor.
    pub driver_version: u32,
    /// The device's name; a simulated one says so.
    pub gpu: String,
    /// Whether this is an optimised build. Figures of another are for trying things out only.
    pub optimised: bool,
}

impl Facts {
    /// Asks the machine, and the driver about `device`.
    ///
    /// # Errors
    /// The driver's.
    pub fn collect(driver: &dyn Driver, device: DeviceId) -> Result<Facts, Cause> {
        Ok(Facts {
            date: std::env::var(DATE_VAR).unwrap_or_else(|_| today()),
            commit: std::env::var(COMMIT_VAR).ok().or_else(commit_of_repository),
            cpu: cpu_model(&read("/proc/cpuinfo")),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            os: format!("{} {}", std::env::consts::OS, read("/proc/sys/kernel/osrelease").trim()),
            driver: driver.kind().to_string(),
            driver_version: driver.driver_version()?,
            gpu: driver.device_name(device)?,
            optimised: !cfg!(debug_assertions),
        })
    }
}

impl fmt::Display for Facts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Facts { date, cpu, cores, os, gpu, .. } = self;
        write!(f, "{date}, {cpu} ({cores} cores), {os}, {gpu}")?;
        if !self.optimised {
            f.write_str(", NOT an optimised build")?;
        }
        Ok(())
    }
}

/// Empty where there is no such file: facts are worth having one by one.
fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn cpu_model(cpuinfo: &str) -> String {
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"));
    model.map_or("unknown", |rest| rest.trim_start_matches([' ', '\t', ':'])).to_owned()
}

fn commit_of_repository() -> Option<String> {
    let output = Command::new("git").args(["rev-parse", "--short", "HEAD"]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let commit = text.trim();
    (output.status.success() && !commit.is_empty()).then(|| commit.to_owned())
}

fn today() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    date_of_day(now.as_secs() / 86_400)
}

/// The date of a day, counted from 1970-01-01.
fn date_of_day(day: u64) -> String {
    // Years from March, so that the leap day is the last of its year, and 400 of them repeat.
    let shifted = day + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let leap_days = day_of_era / 1_460 - day_of_era / 36_524 + day_of_era / 146_096;
    let year_of_era = (day_of_era - leap_days) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day_of_month:02}")
}

#[cfg(test)]
mod tests {
    use vmm_sys::sim::Sim;

    use super::*;

    #[test]
    fn days_have_the_dates_of_the_calendar() {
        let known = [
            (0, "1970-01-01"),
            (58, "1970-02-28"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (19_782, "2024-02-29"),
            (20_786, "2026-11-29"),
        ];
        for (day, date) in known {
            assert_eq!(date_of_day(day), date, "day {day}");
        }
    }

    #[test]
    fn the_processors_name_is_found_and_its_absence_is_no_error() {
        assert_eq!(cpu_model("processor : 0\nmodel name\t: Some CPU 9\nflags : x\n"), "Some CPU 9");
        assert_eq!(cpu_model(""), "unknown");
    }

    #[test]
    fn a_simulated_machine_says_what_it_is() {
        let facts = Facts::collect(&*Sim::builder().build(), DeviceId(0)).unwrap();
        assert_eq!((facts.driver.as_str(), facts.driver_version), ("sim", 13_000));
        assert!(facts.cores >= 1);
        assert_eq!(facts.optimised, !cfg!(debug_assertions));
        assert_eq!(facts.to_string().contains("NOT an optimised"), cfg!(debug_assertions));
    }
}
