//! [`Finding`]: one line of the examination.

use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};
use vmm_sys::{DeviceId, DriverError};

use super::remedy;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It works.
    Ok,
    /// Something is missing that a pool can do without.
    Warn,
    /// A pool cannot work, or cannot be trusted.
    Fail,
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // `pad`, so that a width counts.
        f.pad(match self {
            Status::Ok => "ok",
            Status::Warn => "warn",
            Status::Fail => "fail",
        })
    }
}

/// One finding. Displayed as a line for people, serialised as an object for programs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// Stable name of the check.
    finding: &'static str,
    status: Status,
    /// The ordinal of the device it is about; of the accessing one for a pair.
    device: Option<u32>,
    /// What it means.
    text: String,
    /// What to do.
    advice: Option<String>,
    /// Figures, and the driver's answer.
    detail: Map<String, Value>,
    #[serde(skip)]
    what: String,
}

impl Finding {
    fn new(
        status: Status,
        finding: &'static str,
        what: impl Into<String>,
        text: impl Into<String>,
    ) -> Finding {
        Finding {
            finding,
            status,
            device: None,
            text: text.into(),
            advice: None,
            detail: Map::new(),
            what: what.into(),
        }
    }

    pub(super) fn ok(
        id: &'static str,
        what: impl Into<String>,
        text: impl Into<String>,
    ) -> Finding {
        Finding::new(Status::Ok, id, what, text)
    }

    pub(super) fn warn(
        id: &'static str,
        what: impl Into<String>,
        text: impl Into<String>,
    ) -> Finding {
        Finding::new(Status::Warn, id, what, text)
    }

    pub(super) fn fail(
        id: &'static str,
        what: impl Into<String>,
        text: impl Into<String>,
    ) -> Finding {
        Finding::new(Status::Fail, id, what, text)
    }

    /// Names the device, in front of what was examined.
    pub(super) fn on(mut self, device: DeviceId) -> Finding {
        self.what = format!("{device} {}", self.what);
        self.about(device)
    }

    /// Sets the device where the name of what was examined has it already.
    pub(super) fn about(mut self, device: DeviceId) -> Finding {
        self.device = Some(device.0);
        self
    }

    /// Says what to do.
    pub(super) fn advise(mut self, advice: impl Into<String>) -> Finding {
        self.advice = Some(advice.into());
        self
    }

    /// Adds a figure.
    pub(super) fn with(mut self, name: &str, value: impl Into<Value>) -> Finding {
        self.detail.insert(name.to_owned(), value.into());
        self
    }

    /// Adds the driver's answer, and advice that fits it unless there is some already.
    pub(super) fn refused_by(mut self, error: &DriverError) -> Finding {
        self.advice.get_or_insert_with(|| remedy::of(error).to_owned());
        self.with("call", error.call().name())
            .with("code", error.code().0)
            .with("code_name", error.code().name())
    }

    /// The stable name of the check.
    pub fn id(&self) -> &'static str {
        self.finding
    }

    /// How bad it is.
    pub fn status(&self) -> Status {
        self.status
    }

    /// The device it is about.
    pub fn device(&self) -> Option<DeviceId> {
        self.device.map(DeviceId)
    }

    /// What it means.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// What to do, if there is anything.
    pub fn advice(&self) -> Option<&str> {
        self.advice.as_deref()
    }

    /// A figure by its name.
    pub fn detail(&self, name: &str) -> Option<&Value> {
        self.detail.get(name)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<4}  {}: {}", self.status, self.what, self.text)?;
        match &self.advice {
            Some(advice) => write!(f, "; {advice}"),
            None => Ok(()),
        }
    }
}
