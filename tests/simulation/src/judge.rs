//! Whether a refusal may be: for want of memory where memory is little, for what a caller did, for a call
//! that was made to fail; nothing else.

use vmm_pool::{ElasticError, Error};
use vmm_sys::{Call, DriverError, DriverResult, ResultCode};

use crate::actor::Actor;
use crate::coverage::Outcome;

/// What kind of refusal an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Short,
    Beyond,
    Quota,
    Asleep,
    InUse,
    StillUsed,
    Busy,
    Hole,
    Occupied,
    NoPeer,
    Stuck,
    NotExportable,
    Closed,
    Home,
    Tag,
    Driver,
    Other,
}

impl Kind {
    pub(crate) fn of(error: &Error) -> Kind {
        match error {
            Error::Elastic(error) => match error {
                ElasticError::BeyondCapacity { .. } => Kind::Beyond,
                ElasticError::OverQuota { .. } => Kind::Quota,
                ElasticError::Asleep => Kind::Asleep,
                ElasticError::InUse { .. } => Kind::InUse,
                ElasticError::StillUsed { .. } => Kind::StillUsed,
                ElasticError::Busy => Kind::Busy,
                ElasticError::NotCommitted { .. } => Kind::Hole,
                ElasticError::Occupied { .. } => Kind::Occupied,
                ElasticError::NoPeer { .. } | ElasticError::NoHostMemory { .. } => Kind::NoPeer,
                ElasticError::Stuck { .. } => Kind::Stuck,
                ElasticError::NotExportable => Kind::NotExportable,
                ElasticError::HomeAccess { .. } => Kind::Home,
                ElasticError::UnknownTag { .. } => Kind::Tag,
                ElasticError::HostShort { .. } | ElasticError::NobodyLends { .. } => Kind::Short,
                ElasticError::NotLent { .. } => Kind::Short,
                _ => Kind::Other,
            },
            Error::LaneClosed => Kind::Closed,
            Error::Driver(_) => Kind::Driver,
            error if error.is_out_of_memory() => Kind::Short,
            _ => Kind::Other,
        }
    }
}

/// The driver's part in an error.
fn cause(error: &Error) -> Option<&DriverError> {
    match error {
        Error::Driver(cause) | Error::OutOfAddresses { cause, .. } => Some(cause),
        Error::OutOfMemory(facts) => facts.cause.as_ref(),
        Error::Elastic(ElasticError::HostShort { cause, .. }) => cause.as_ref(),
        Error::Elastic(ElasticError::NoHostMemory { cause, .. }) => Some(cause),
        Error::Elastic(ElasticError::NoPeer {
            cause: vmm_pool::PeerFault::Refused(cause), ..
        }) => Some(cause),
        _ => None,
    }
}

impl Actor {
    /// The answer of an operation, if it was done. It may be refused for a reason in `may`, for want of
    /// memory, or by a call that was made to fail.
    pub(crate) fn judge<T>(
        &self,
        operation: &'static str,
        outcome: Result<T, Error>,
        may: &[Kind],
    ) -> Option<T> {
        let error = match outcome {
            Ok(answer) => {
                self.came_out(operation, Outcome::Done, "done");
                return Some(answer);
            }
            Err(error) => error,
        };
        let text = error.to_string();
        if let Some(cause) = cause(&error) {
            assert!(text.contains(cause.call().name()), "{operation}: which call? {text}");
        }
        let outcome = self.excuse(&error, may);
        let Some(outcome) = outcome else {
            panic!("actor {}: {operation} was refused, and may not be: {text}", self.number);
        };
        self.came_out(operation, outcome, &text);
        None
    }

    fn excuse(&self, error: &Error, may: &[Kind]) -> Option<Outcome> {
        if self.world.is_lost() {
            return Some(Outcome::Refused);
        }
        let kind = Kind::of(error);
        if may.contains(&kind) || kind == Kind::Short && self.world.setup.tight {
            return Some(Outcome::Refused);
        }
        let by_fault = match (kind, cause(error)) {
            (Kind::Driver, Some(cause)) if self.is_in_the_way(cause) => true,
            (Kind::Driver | Kind::NoPeer, Some(cause)) => self.was_failed(cause),
            (Kind::Short | Kind::Stuck | Kind::NoPeer, _) => self.any_failed(),
            (Kind::Other, Some(cause)) => self.was_failed(cause),
            _ => false,
        };
        by_fault.then_some(Outcome::Failed)
    }

    /// Whether that very call was made to fail with that very code.
    fn was_failed(&self, cause: &DriverError) -> bool {
        let fired = self.world.sim.faults_fired_by();
        fired.iter().any(|(call, code, _)| *call == cause.call() && *code == Some(cause.code()))
    }

    /// Whether addresses are mapped still, which the driver would not unmap before.
    fn is_in_the_way(&self, cause: &DriverError) -> bool {
        let (code, fired) = (ResultCode::INVALID_VALUE, self.world.sim.faults_fired_by());
        cause.call() == Call::MemMap
            && cause.code() == code
            && fired.iter().any(|(call, code, _)| *call == Call::MemUnmap && code.is_some())
    }

    /// Whether any call was made to fail.
    pub(crate) fn any_failed(&self) -> bool {
        self.world.sim.faults_fired_by().iter().any(|(_, code, _)| code.is_some())
    }

    /// As `judge`, for the actor's own calls.
    pub(crate) fn drive<T>(&self, what: &str, outcome: DriverResult<T>) -> Option<T> {
        match outcome {
            Ok(answer) => Some(answer),
            Err(error) if self.world.is_lost() || self.was_failed(&error) => {
                self.say(&format!("{what} is left out: {error}"));
                None
            }
            Err(error) => panic!("actor {}: {what}: {error}", self.number),
        }
    }
}
