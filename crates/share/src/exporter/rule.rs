//! Who is let in.

use std::fmt;
use std::sync::Arc;

use vmm_sys::caught::thrown;

use crate::os::PeerCredentials;

type Custom = Arc<dyn Fn(&PeerCredentials) -> bool + Send + Sync>;

/// Which processes an exporter lets in. The kernel says who they are, and nobody can lie to it.
#[derive(Clone, Default)]
pub enum PeerRule {
    /// Those of the user that the exporter runs as.
    #[default]
    SameUser,
    /// Those of these users.
    Users(Vec<u32>),
    /// Those for which the function says yes. It runs in the exporter's own thread: it must be
    /// quick. One that panics says no.
    Custom(Custom),
}

impl PeerRule {
    /// A rule by a function: see [`PeerRule::Custom`].
    pub fn custom(rule: impl Fn(&PeerCredentials) -> bool + Send + Sync + 'static) -> PeerRule {
        PeerRule::Custom(Arc::new(rule))
    }

    pub(super) fn admits(&self, peer: &PeerCredentials) -> bool {
        match self {
            PeerRule::SameUser => peer.uid == rustix::process::geteuid().as_raw(),
            PeerRule::Users(users) => users.contains(&peer.uid),
            PeerRule::Custom(rule) => thrown(|| rule(peer)).unwrap_or_else(|_| {
                vmm_sys::say!(warn, ?peer, "a rule for peers panicked; the peer is refused");
                false
            }),
        }
    }
}

impl fmt::Debug for PeerRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PeerRule::SameUser => f.write_str("SameUser"),
            PeerRule::Users(users) => write!(f, "Users({users:?})"),
            PeerRule::Custom(_) => f.write_str("Custom"),
        }
    }
}
