//! What a run comes to: counts, or where it went wrong.

use std::fmt;
use std::ops::AddAssign;

/// What a run did, so that a test can see that it did something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Runs.
    pub runs: u64,
    /// Requests served.
    pub served: u64,
    /// Requests refused for want of memory.
    pub short: u64,
    /// Requests refused for what they asked.
    pub refused: u64,
    /// Requests that the driver's failures ended.
    pub failed: u64,
    /// Contents compared.
    pub checked: u64,
    /// Steps after which memory was in limbo.
    pub limbo: u64,
    /// Steps after which a replaced mapping stood.
    pub retired: u64,
    /// Lanes that were found idle and gave something.
    pub idled: u64,
    /// Driver calls that were made to fail.
    pub faults: u64,
    /// Captures with memory of their own.
    pub captures: u64,
    /// Launches of their graphs.
    pub launches: u64,
    /// Elastic buffers whose memory moved.
    pub moves: u64,
    /// Of these, moves that had to wait for streams that were held.
    pub waited: u64,
    /// Elastic buffers that fell asleep or woke.
    pub sleeps: u64,
    /// Operations on elastic buffers that had to be refused, and were.
    pub elastic_refused: u64,
    /// Operations on elastic buffers that failed and changed nothing.
    pub elastic_failed: u64,
    /// Times that slots of elastic buffers came to share chunks.
    pub shared: u64,
    /// Copies from slot to slot.
    pub copied: u64,
    /// Chunks of elastic buffers whose contents were compared.
    pub elastic_checked: u64,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.runs += other.runs;
        self.served += other.served;
        self.short += other.short;
        self.refused += other.refused;
        self.failed += other.failed;
        self.checked += other.checked;
        self.limbo += other.limbo;
        self.retired += other.retired;
        self.idled += other.idled;
        self.faults += other.faults;
        self.captures += other.captures;
        self.launches += other.launches;
        self.moves += other.moves;
        self.waited += other.waited;
        self.sleeps += other.sleeps;
        self.elastic_refused += other.elastic_refused;
        self.elastic_failed += other.elastic_failed;
        self.shared += other.shared;
        self.copied += other.copied;
        self.elastic_checked += other.elastic_checked;
    }
}

/// Where a run went wrong, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The step, from 1; one more than there are if it was the end.
    pub step: usize,
    /// In words.
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}: {}", self.step, self.text)
    }
}
