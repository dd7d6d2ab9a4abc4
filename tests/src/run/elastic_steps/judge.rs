//! Whether an operation on an elastic buffer came out as it had to.

use vmm_pool::{ElasticError, Error};

use super::super::Runner;

/// What kind of refusal an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Beyond,
    Quota,
    Asleep,
    UnknownPlace,
    UnknownDevice,
    UnknownTag,
    Home,
    NoAccess,
    Hole,
    Occupied,
    Overlap,
    InUse,
    StillUsed,
    Short,
    NoPeer,
    Other,
}

impl Kind {
    fn of(error: &Error) -> Kind {
        match error {
            Error::Elastic(error) => match error {
                ElasticError::BeyondCapacity { .. } => Kind::Beyond,
                ElasticError::OverQuota { .. } => Kind::Quota,
                ElasticError::Asleep => Kind::Asleep,
                ElasticError::UnknownPlace { .. } => Kind::UnknownPlace,
                ElasticError::UnknownTag { .. } => Kind::UnknownTag,
                ElasticError::HomeAccess { .. } => Kind::Home,
                ElasticError::NoAccess { .. } => Kind::NoAccess,
                ElasticError::NotCommitted { .. } => Kind::Hole,
                ElasticError::Occupied { .. } => Kind::Occupied,
                ElasticError::Overlap { .. } => Kind::Overlap,
                ElasticError::InUse { .. } => Kind::InUse,
                ElasticError::StillUsed { .. } => Kind::StillUsed,
                ElasticError::HostShort { .. } => Kind::Short,
                ElasticError::NoPeer { .. } => Kind::NoPeer,
                _ => Kind::Other,
            },
            Error::UnknownDevice { .. } => Kind::UnknownDevice,
            error if error.is_out_of_memory() => Kind::Short,
            _ => Kind::Other,
        }
    }
}

impl Runner<'_> {
    /// The answer of an operation that succeeded; `None` if it was refused as it had to be: for one
    /// of the reasons in `must`, if there are any. For those in `may` it can be refused as well; and
    /// for want of memory where that may be, or whatever a failing driver makes of it.
    pub(super) fn judge<T>(
        &mut self,
        outcome: Result<T, Error>,
        must: &[Kind],
        may: &[Kind],
    ) -> Result<Option<T>, String> {
        let error = match outcome {
            Ok(_) if !must.is_empty() => return Err(format!("was done, where {must:?} is due")),
            Ok(answer) => return Ok(Some(answer)),
            Err(error) => error,
        };
        let kind = Kind::of(&error);
        if must.contains(&kind) {
            self.tally.elastic_refused += 1;
            return Ok(None);
        }
        let excused = self.faulty
            || may.contains(&kind)
            || kind == Kind::Short && self.may_be_short()
            // What was found out about a pair while calls failed stays so.
            || kind == Kind::NoPeer && self.was_faulty;
        if excused {
            self.tally.elastic_failed += 1;
            return Ok(None);
        }
        Err(format!("refused, where {must:?} is due: {error}"))
    }

    /// How many calls were failed by now.
    pub(super) fn faults_fired(&self) -> u64 {
        self.machine.sim().map_or(0, |sim| sim.faults_fired())
    }
}
