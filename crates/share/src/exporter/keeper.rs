//! [`Keeper`]: what an owner process adds to an exporter.

use std::fmt;

use crate::error::Refusal;
use crate::os::PeerCredentials;
use crate::wire::{Message, OwnerMessage};

/// Somebody who makes buffers for clients. Called by the thread that talks to them, so nothing here
/// waits for the pool or the driver.
pub(crate) trait Keeper: fmt::Debug + Send + Sync {
    /// A client was let in.
    fn came(&self, client: u64, peer: PeerCredentials);

    /// Its connection has ended.
    fn gone(&self, client: u64);

    /// It opens what is offered by a name: whether it may.
    fn open(&self, client: u64, name: &str, write: bool) -> Result<(), (Refusal, String)>;

    /// It asks something; the answer. `None`: later, by [`Keeper::answer`].
    fn ask(&self, client: u64, question: OwnerMessage) -> Option<Message>;

    /// The answer to what it asked, told once, if it is there.
    fn answer(&self, client: u64) -> Option<Message>;
}
