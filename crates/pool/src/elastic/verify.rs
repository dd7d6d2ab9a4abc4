//! The walker's view of elastic buffers (docs/INVARIANTS.md).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use crate::place::Place;
use crate::places::{Places, Site};

use super::body::Body;
use super::state::{Backing, Standing, State};

/// What buffers have at one place, or what the books say of it, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    elastic: u64,
    /// Booked under the lending budget of the place.
    loans: u64,
    /// In buffers whose home is elsewhere.
    lent: u64,
    /// Elsewhere, in buffers whose home the place is.
    borrowed: u64,
}

impl Sums {
    fn on_the_books(site: Site<'_>) -> Sums {
        let lending = &site.depot.lending;
        Sums {
            elastic: site.depot.elastic_bytes(),
            loans: lending.booked_bytes(),
            lent: lending.lent_bytes(),
            borrowed: lending.borrowed_bytes(),
        }
    }
}

/// Walks every elastic buffer of a pool. Sums are checked only for places of which no thread has
/// memory in its hands.
pub(crate) fn buffers(places: &Places) -> Result<(), String> {
    let before: Vec<_> = places.sites().map(|site| site.depot.carries.settled()).collect();
    let booked: Vec<Sums> = places.sites().map(Sums::on_the_books).collect();
    let mut found: Vec<Sums> = vec![Sums::default(); before.len()];
    let (broken, bodies): (Vec<_>, Vec<_>) =
        places.bodies().into_iter().partition(|body| body.broken().is_some());
    for body in bodies {
        let name = format!("elastic buffer at {:#x}", body.address());
        let of = |place| places.sites().position(|site| site.place == place);
        walk(&body, of, &mut found).map_err(|text| format!("{text}: {name}"))?;
    }
    if !broken.is_empty() {
        // What is on the books for it is nobody's to know.
        return Ok(());
    }
    let is_quiet = |(site, before): (Site<'_>, &Option<u64>)| {
        before.is_some() && site.depot.carries.settled() == *before
    };
    let quiet: Vec<bool> = places.sites().zip(&before).map(is_quiet).collect();
    let all_quiet = quiet.iter().all(|it| *it);
    for (index, site) in places.sites().enumerate().filter(|(index, _)| quiet[*index]) {
        let (mut found, booked) = (found[index], booked[index]);
        if !all_quiet {
            // It lies in places that are in somebody's hands.
            found.borrowed = booked.borrowed;
        }
        let (place, number) = (site.place, if found.elastic == booked.elastic { 33 } else { 3 });
        if found != booked {
            return Err(format!("I{number}: {place}: buffers have {found:?}, booked {booked:?}"));
        }
        if booked.loans > site.depot.lending.budget_bytes() {
            return Err(format!("I35: {place}: the lending budget is passed: {booked:?}"));
        }
    }
    hosts(places, &before)
}

/// The law of host memory: every byte owned is in one place.
fn hosts(places: &Places, carries: &[Option<u64>]) -> Result<(), String> {
    for (index, site) in places.sites().enumerate().filter(|(_, it)| it.place.device().is_none()) {
        let depot = site.depot;
        let found = depot.elastic_bytes()
            + depot.leaving.bytes()
            + depot.stock.lock().bytes()
            + depot.landing.bytes();
        let held = depot.held_bytes();
        let quiet = carries[index].is_some() && depot.carries.settled() == carries[index];
        if quiet && found != held {
            return Err(format!("I1: {}: {held} bytes are booked, {found} found", site.place));
        }
        if held > depot.terms.limit_bytes {
            let limit = depot.terms.limit_bytes;
            return Err(format!("I2: {}: {held} bytes exceed the limit {limit}", site.place));
        }
    }
    Ok(())
}

/// Adds up what a buffer has, by place.
fn walk(
    body: &Body,
    index_of: impl Fn(Place) -> Option<usize>,
    found: &mut [Sums],
) -> Result<(), String> {
    let state = body.state();
    let chunk_bytes = body.shape.chunk_bytes;
    let home = Place::Device(state.home);
    let known =
        |place| index_of(place).ok_or(format!("I27: a piece lies on {place}, unknown here"));
    let listed = |is_in: fn(&Standing) -> bool| {
        let those = state.pieces.iter().filter(|(_, it)| is_in(it));
        those.map(|(slot, _)| *slot).collect::<BTreeSet<u32>>()
    };
    // A thread that brings memory back has it in its hands.
    if !listed(|it| matches!(it.backing, Backing::Stuck(_))).is_subset(&state.stuck)
        || listed(|it| !it.owed.is_empty()) != state.indebted
        || listed(|it| !it.aliases.is_empty()) != state.aliased
    {
        return Err("I27: what operations begin with is not listed right".to_owned());
    }
    // Each chunk once, and one footing for all of its slots.
    let (mut footings, mut chunks) = (HashSet::new(), HashMap::new());
    for (slot, standing) in &state.pieces {
        check_piece(body, &state, *slot, standing)?;
        let footing = Arc::as_ptr(&standing.footing);
        if let Some(mapping) = standing.mapping()
            && *chunks.entry(Arc::as_ptr(mapping.chunk())).or_insert(footing) != footing
        {
            return Err(format!("I36: the chunk of slot {slot} is counted twice"));
        }
        if !footings.insert(footing) {
            continue;
        }
        let sums = &mut found[known(standing.place)?];
        sums.elastic += chunk_bytes;
        sums.loans += if standing.is_borrowed() { chunk_bytes } else { 0 };
        if standing.place != home {
            sums.lent += chunk_bytes;
            found[known(home)?].borrowed += chunk_bytes;
        }
    }
    if chunks.values().collect::<HashSet<_>>().len() != chunks.len() {
        return Err("I36: chunks that differ are counted as one".to_owned());
    }
    for (place, incoming) in &state.incoming {
        let sums = &mut found[known(*place)?];
        sums.elastic += incoming.bytes;
        sums.loans += incoming.booked_bytes;
    }
    if let Some(quota) = &body.shape.quota
        && quota.booked_bytes() > quota.limit_bytes()
    {
        return Err(format!("I2: the quota is passed: {quota:?}"));
    }
    Ok(())
}

fn check_piece(body: &Body, state: &State, slot: u32, standing: &Standing) -> Result<(), String> {
    let chunk_bytes = body.shape.chunk_bytes;
    let offset = u64::from(slot) * chunk_bytes;
    if let Some(mapping) = standing.mapping() {
        if mapping.address() != body.address() + offset || mapping.bytes() != chunk_bytes {
            return Err(format!("I27: slot {slot} holds {mapping:?}"));
        }
        if *mapping.chunk().props() != body.props(standing.place) {
            return Err(format!("I27: slot {slot} holds a chunk of the wrong kind"));
        }
    }
    if offset + chunk_bytes > body.range.bytes() {
        return Err(format!("I27: slot {slot} lies beyond the reserved addresses"));
    }
    if standing.generation == 0 || standing.generation > state.generation {
        let (piece, buffer) = (standing.generation, state.generation);
        return Err(format!("I27: slot {slot} is of generation {piece}, the buffer {buffer}"));
    }
    if standing.lent.is_some() == (standing.place == Place::Device(state.home)) {
        return Err(format!("I35: slot {slot} is on nobody's account, or its home borrowed it"));
    }
    Ok(())
}
