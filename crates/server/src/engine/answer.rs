//! [`Answer`]: a sink that keeps what it is told, for whoever drives an engine without a network.

use std::sync::Arc;

use parking_lot::Mutex;

use super::task::{Outcome, Sink};

/// What a request was answered so far. Clones share it. Once all clones but the engine's are gone,
/// nobody listens any more.
#[derive(Clone, Debug, Default)]
pub struct Answer(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    tokens: Vec<u32>,
    outcome: Option<Outcome>,
}

impl Answer {
    /// The tokens so far.
    pub fn tokens(&self) -> Vec<u32> {
        self.0.lock().tokens.clone()
    }

    /// How it ended, if it did.
    pub fn outcome(&self) -> Option<Outcome> {
        self.0.lock().outcome.clone()
    }
}

impl Sink for Answer {
    fn token(&mut self, id: u32) {
        self.0.lock().tokens.push(id);
    }

    fn done(&mut self, outcome: Outcome) {
        self.0.lock().outcome = Some(outcome);
    }

    fn is_gone(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }
}
