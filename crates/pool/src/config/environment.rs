//! Settings out of `VMM_POOL_…` variables.
//!
//! Read once, when the builder is told to: the library looks at no variable in the middle of its
//! work.

use std::ffi::{OsStr, OsString};

use super::{Origin, Settings, text};
use crate::error::Error;

const PREFIX: &str = "VMM_POOL_";

/// Read elsewhere: the driver is there before a builder is.
const ELSEWHERE: [&str; 1] = ["VMM_POOL_DRIVER"];

/// Takes a value over, or says what is expected.
type Read = fn(&mut Settings, &OsStr) -> Result<(), String>;

struct Variable {
    name: &'static str,
    /// The setting, as errors of the validation name it.
    setting: &'static str,
    read: Read,
}

const VARIABLES: [Variable; 11] = [
    Variable {
        name: "VMM_POOL_CHUNK",
        setting: "chunk",
        read: |into, value| text::chunk(words(value)?).map(|it| into.chunk = it),
    },
    Variable {
        name: "VMM_POOL_PLACEMENT",
        setting: "placement",
        read: |into, value| text::placement(words(value)?).map(|it| into.placement = it),
    },
    Variable {
        name: "VMM_POOL_SOFT_LIMIT",
        setting: "soft limit",
        read: |into, value| text::soft_limit(words(value)?).map(|it| into.soft_limit = it),
    },
    Variable {
        name: "VMM_POOL_LIMIT",
        setting: "limit",
        read: |into, value| text::bytes_or_off(words(value)?).map(|it| into.limit_bytes = it),
    },
    Variable {
        name: "VMM_POOL_STOCK_LOW",
        setting: "low mark of the stock",
        read: |into, value| text::bytes(words(value)?).map(|it| into.stock_low_bytes = it),
    },
    Variable {
        name: "VMM_POOL_STOCK_HIGH",
        setting: "high mark of the stock",
        read: |into, value| {
            let mark = text::bytes_or_off(words(value)?)?;
            into.stock_high_bytes = mark.unwrap_or(u64::MAX);
            Ok(())
        },
    },
    Variable {
        name: "VMM_POOL_BACKGROUND",
        setting: "background",
        read: |into, value| text::switch(words(value)?).map(|it| into.background = it),
    },
    Variable {
        name: "VMM_POOL_IDLE_LANE_MS",
        setting: "time of an idle lane",
        read: |into, value| text::ms_or_off(words(value)?).map(|it| into.idle_lane_ms = it),
    },
    Variable {
        name: "VMM_POOL_SCRUB",
        setting: "scrub between tags",
        read: |into, value| text::switch(words(value)?).map(|it| into.scrub_between_tags = it),
    },
    Variable {
        name: "VMM_POOL_DEBUG",
        setting: "debug mode",
        read: |into, value| text::debug_mode(words(value)?).map(|it| into.debug_mode = it),
    },
    Variable {
        name: "VMM_POOL_TRACE",
        setting: Settings::TRACE,
        read: |into, value| {
            into.trace = Some(value.into());
            Ok(())
        },
    },
];

fn words(value: &OsStr) -> Result<&str, String> {
    value.to_str().ok_or_else(|| "expected UTF-8".to_owned())
}

impl Settings {
    /// Takes over what the environment of this process sets.
    pub(crate) fn merge_environment(&mut self) -> Result<(), Error> {
        let names = std::env::vars_os().map(|(name, _)| name);
        for name in unknown(names) {
            let known = VARIABLES.map(|variable| variable.name).join(", ");
            vmm_sys::say!(
                warn,
                "{name} is no variable of the pool, and changes nothing; known: {known}"
            );
        }
        self.merge(&|name| std::env::var_os(name))
    }

    /// Takes over what `lookup` knows. All or nothing.
    pub(crate) fn merge(&mut self, lookup: &dyn Fn(&str) -> Option<OsString>) -> Result<(), Error> {
        let mut merged = self.clone();
        for Variable { name, setting, read } in VARIABLES {
            let Some(value) = lookup(name).filter(|value| !value.is_empty()) else { continue };
            read(&mut merged, &value).map_err(|expected| {
                // The word is the error's own.
                let expected = expected.trim_start_matches("expected ").to_owned();
                Error::BadSetting { setting: name, value: value.display().to_string(), expected }
            })?;
            merged.origins.retain(|origin| origin.variable != name);
            merged.origins.push(Origin { setting, variable: name, value });
        }
        *self = merged;
        Ok(())
    }

    /// A setting that came out of a variable is refused by that name, with the value as it stands
    /// there.
    pub(super) fn blame_variable(&self, error: Error) -> Error {
        let Error::BadSetting { setting, value, expected } = error else { return error };
        match self.origins.iter().find(|origin| origin.setting == setting) {
            Some(Origin { variable, value, .. }) => Error::BadSetting {
                setting: variable,
                value: value.display().to_string(),
                expected,
            },
            None => Error::BadSetting { setting, value, expected },
        }
    }
}

/// Names with the pool's prefix that mean nothing to it.
fn unknown(names: impl Iterator<Item = OsString>) -> Vec<String> {
    let mut unknown: Vec<String> = names
        .map(|name| name.to_string_lossy().into_owned())
        .filter(|name| name.starts_with(PREFIX))
        .filter(|name| VARIABLES.iter().all(|variable| variable.name != name))
        .filter(|name| !ELSEWHERE.contains(&name.as_str()))
        .collect();
    unknown.sort();
    unknown
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use vmm_sys::sim::Sim;
    use vmm_sys::{DeviceId, Driver};

    use super::*;
    use crate::config::{ChunkSize, DebugMode, Placement};

    fn merged(pairs: &[(&str, &str)]) -> Result<Settings, Error> {
        let mut settings = Settings { limit_bytes: Some(7 << 30), ..Settings::default() };
        let find = |name: &str| pairs.iter().find(|pair| pair.0 == name);
        settings.merge(&|name| find(name).map(|pair| pair.1.into()))?;
        Ok(settings)
    }

    #[test]
    fn what_is_set_replaces_the_builders_values_and_the_rest_stays() {
        let settings = merged(&[]).unwrap();
        assert_eq!((settings.chunk, settings.limit_bytes), (ChunkSize::Auto, Some(7 << 30)));
        let settings = merged(&[
            ("VMM_POOL_CHUNK", "32M"),
            ("VMM_POOL_PLACEMENT", "buddy"),
            ("VMM_POOL_SOFT_LIMIT", "off"),
            ("VMM_POOL_LIMIT", "3GiB"),
            ("VMM_POOL_STOCK_LOW", "64M"),
            ("VMM_POOL_STOCK_HIGH", "1G"),
            ("VMM_POOL_BACKGROUND", "0"),
            ("VMM_POOL_IDLE_LANE_MS", "250"),
            ("VMM_POOL_SCRUB", "1"),
            ("VMM_POOL_DEBUG", "guard"),
            ("VMM_POOL_TRACE", "/tmp/a trace"),
        ])
        .unwrap();
        assert_eq!(settings.chunk, ChunkSize::Fixed(32 << 20));
        assert_eq!(settings.placement, Placement::Buddy);
        assert_eq!(settings.soft_limit, None);
        assert_eq!(settings.limit_bytes, Some(3 << 30));
        assert_eq!((settings.stock_low_bytes, settings.stock_high_bytes), (64 << 20, 1 << 30));
        assert!(!settings.background);
        assert_eq!(settings.idle_lane_ms, Some(250));
        assert!(settings.scrub_between_tags);
        assert_eq!(settings.debug_mode, DebugMode::Guard);
        assert_eq!(settings.trace, Some("/tmp/a trace".into()));
    }

    #[test]
    fn off_takes_a_limit_back_and_empty_is_not_set() {
        let settings = merged(&[("VMM_POOL_LIMIT", "off"), ("VMM_POOL_CHUNK", "")]).unwrap();
        assert_eq!((settings.limit_bytes, settings.chunk), (None, ChunkSize::Auto));
        let settings = merged(&[("VMM_POOL_STOCK_HIGH", "off")]).unwrap();
        assert_eq!(settings.stock_high_bytes, u64::MAX);
    }

    #[test]
    fn a_bad_value_names_variable_value_and_expectation() {
        for (name, value, part) in [
            ("VMM_POOL_CHUNK", "big", "a number of bytes"),
            ("VMM_POOL_CHUNK", "2.5M", "or `auto`"),
            ("VMM_POOL_PLACEMENT", "best", "`first-fit` or `buddy`"),
            ("VMM_POOL_SOFT_LIMIT", "-1", "a fraction of at least 0"),
            ("VMM_POOL_LIMIT", "all", "or `off`"),
            ("VMM_POOL_STOCK_LOW", "off", "KiB, MiB, GiB"),
            ("VMM_POOL_STOCK_HIGH", "64MB", "KiB, MiB, GiB"),
            ("VMM_POOL_BACKGROUND", "true", "`1` or `0`"),
            ("VMM_POOL_IDLE_LANE_MS", "10s", "milliseconds, or `off`"),
            ("VMM_POOL_SCRUB", "yes", "`1` or `0`"),
            ("VMM_POOL_DEBUG", "1", "`off` or `guard`"),
        ] {
            let error = merged(&[(name, value)]).unwrap_err();
            let text = error.to_string();
            let start = format!("{name} = {value}: expected ");
            assert!(text.starts_with(&start) && text.contains(part), "{text}");
            assert_eq!(text.matches("expected").count(), 1, "{text}");
        }
    }

    #[test]
    fn a_value_that_is_no_text_is_refused() {
        let mut settings = Settings::default();
        let lookup =
            |name: &str| (name == "VMM_POOL_LIMIT").then(|| OsString::from_vec(vec![b'2', 0xFF]));
        let error = settings.merge(&lookup).unwrap_err();
        assert!(error.to_string().contains("expected UTF-8"), "{error}");
    }

    #[test]
    fn a_bad_value_leaves_all_settings_as_they_were() {
        let mut settings = Settings::default();
        let lookup = |name: &str| match name {
            "VMM_POOL_CHUNK" => Some("2M".into()),
            "VMM_POOL_BACKGROUND" => Some("2".into()),
            _ => None,
        };
        settings.merge(&lookup).unwrap_err();
        assert_eq!(settings.chunk, ChunkSize::Auto);
    }

    #[test]
    fn a_value_that_the_device_refuses_is_blamed_on_its_variable() {
        let driver: std::sync::Arc<dyn Driver> = Sim::builder().build();
        for (name, value, part) in [
            ("VMM_POOL_CHUNK", "3M", "a power of two"),
            ("VMM_POOL_SOFT_LIMIT", "2000", "0..=1000"),
            ("VMM_POOL_LIMIT", "1K", "at least the granularity"),
            ("VMM_POOL_IDLE_LANE_MS", "0", "at least 1 millisecond"),
        ] {
            let settings = merged(&[(name, value)]).unwrap();
            let error = settings.validate(&driver, DeviceId(0)).unwrap_err();
            let text = error.to_string();
            assert!(text.starts_with(&format!("{name} = {value}: ")), "{text}");
            assert!(text.contains(part), "{text}");
        }
        // The builder's own value is blamed on the setting.
        let settings = Settings { chunk: ChunkSize::Fixed(3 << 20), ..Settings::default() };
        let error = settings.validate(&driver, DeviceId(0)).unwrap_err();
        assert!(error.to_string().starts_with("chunk = 3145728: "), "{error}");
    }

    #[test]
    fn only_unknown_names_with_the_prefix_are_warned_of() {
        let known = ["PATH", "VMM_POOL_CHUNK", "VMM_POOL_DRIVER", "XVMM_POOL_A"];
        let names = known.into_iter().chain(["VMM_POOL_CHUNKS", "VMM_POOL_"]);
        let found = unknown(names.map(OsString::from));
        assert_eq!(found, ["VMM_POOL_", "VMM_POOL_CHUNKS"]);
    }

    #[test]
    fn every_variable_is_documented() {
        let page = include_str!("../../../../docs/CONFIGURATION.md");
        for Variable { name, .. } in VARIABLES {
            assert!(page.contains(&format!("| `{name}` |")), "{name}");
        }
    }
}
