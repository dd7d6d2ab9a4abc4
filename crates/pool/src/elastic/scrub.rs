//! Zeroing memory that others used, before a buffer's users and other processes find it.
//!
//! At the buffer's own addresses, where its chunks stand by then and nobody knows of them: so it costs no
//! mapping call. By a stream of the pool's own, which waits for nobody's work; all chunks of a growth
//! together, and the caller waits once.

use vmm_sys::object::{Chunk, Mapping, RelaxedCapture};

use super::body::Body;
use super::copier::Copier;
use super::operation::Operation;
use crate::error::Error;
use crate::past::{self, User};

impl Body {
    /// Whether what is in a chunk of the stock is nobody's business here.
    fn is_foreign(&self, chunk: &Chunk) -> bool {
        let user = past::user_of(chunk);
        user != User::Nobody && (self.shape.scrubs || user != self.shape.user)
    }
}

impl Operation<'_> {
    /// Zeroes those of `mappings` that need it, which nobody uses, and of which `home` may write each.
    /// After an error none of them is being written, and they are as foreign as before.
    pub(super) fn scrub<'m>(
        &self,
        mappings: impl Iterator<Item = &'m Mapping>,
    ) -> Result<(), Error> {
        let body = self.0;
        let foreign: Vec<&Mapping> = mappings.filter(|it| body.is_foreign(it.chunk())).collect();
        if foreign.is_empty() {
            return Ok(());
        }
        let _relaxed = RelaxedCapture::enter(body.range.driver())?;
        let copier = body.places.copiers.take(body.range.driver(), body.home(), 1)?;
        let zeroed = zero(&foreign, &copier);
        if zeroed.is_err()
            && let Err(error) = copier.stream.synchronize()
        {
            // Nothing may be written any more when the memory goes.
            vmm_sys::say!(warn, %error, "the end of a scrub is not known");
        }
        body.places.copiers.put(copier);
        zeroed?;
        for mapping in &foreign {
            past::note_only_user(mapping.chunk(), &User::Nobody);
        }
        let bytes = self.bytes_of(foreign.len());
        body.state().counts.scrubbed_bytes += bytes;
        for mapping in foreign {
            let place = crate::place::Place::of(mapping.chunk().props());
            if let Ok(site) = body.places.site(place) {
                site.depot.scrubbed(mapping.bytes());
            }
        }
        Ok(())
    }
}

/// Asks for the end, for whoever waits in the driver may wait for somebody who waits for this thread.
fn zero(mappings: &[&Mapping], copier: &Copier) -> Result<(), Error> {
    for mapping in mappings {
        mapping.fill(0, &copier.stream)?;
    }
    if let [zeroed, ..] = &copier.events[..] {
        zeroed.record(&copier.stream)?;
    }
    copier.wait_beyond(0, 1)?;
    Ok(())
}
