//! [`Pool::recall`]: a lender calls its memory back.

use std::time::{Duration, Instant};

use super::Pool;
use crate::elastic::recall::{NotRecalled, Recall, Ways};
use crate::error::Error;
use crate::place::Place;

impl Pool {
    /// Calls back memory that `lender` lent, `bytes` at least if there is so much ([`u64::MAX`]: all).
    /// Each buffer that borrowed there, those in use last, moves it home as far as its home has
    /// room, and else to the host, if the pool has memory there. What left lies in the lender's
    /// stock. Guards of [`ElasticBuffer::use_on`](crate::ElasticBuffer::use_on) that are alive are
    /// waited for, `patience` at most in all.
    ///
    /// What was placed there by name is not called back: its owner moves it
    /// ([`ElasticBuffer::come_home`](crate::ElasticBuffer::come_home)).
    ///
    /// # Errors
    /// [`ElasticError::UnknownPlace`](crate::ElasticError::UnknownPlace), [`Error::DriverGone`]. What
    /// a borrower does not give back, and why, is in the answer.
    pub fn recall(
        &self,
        lender: impl Into<Place>,
        bytes: u64,
        patience: Duration,
    ) -> Result<Recall, Error> {
        let lender = lender.into();
        let places = &self.0.places;
        places.site(lender)?;
        if vmm_sys::process::is_forked_child() || places.driver.is_gone() {
            return Err(Error::DriverGone);
        }
        let _within = vmm_sys::within!("vmm_pool.recall", lender = %lender, bytes);
        let since = Instant::now();
        let ways = Ways { home: true, host: true };
        let mut recall = Recall::default();
        let mut bodies = places.bodies();
        bodies.retain(|body| !body.state().borrowed(Some(lender)).is_empty());
        bodies.sort_by_key(|body| body.uses.is_in_use());
        for body in bodies {
            let missing_bytes = bytes.saturating_sub(recall.moved_bytes);
            if missing_bytes == 0 {
                break;
            }
            let left = patience.saturating_sub(since.elapsed());
            let refused = match body.operate_unless_ended() {
                Ok(None) => continue,
                Ok(Some(operation)) => {
                    let given = operation.give_back(lender, missing_bytes, ways, left);
                    recall.moved_bytes += given.home_bytes + given.host_bytes;
                    recall.to_host_bytes += given.host_bytes;
                    given.refused
                }
                Err(error) => {
                    let slots = body.state().borrowed(Some(lender));
                    let lent_chunks = body.chunks_of(slots.into_iter()).count() as u64;
                    Some((lent_chunks * body.shape.chunk_bytes, error))
                }
            };
            if let Some((bytes, why)) = refused {
                recall.refused.push(NotRecalled { address: body.address(), bytes, why });
            }
        }
        Ok(recall)
    }
}
