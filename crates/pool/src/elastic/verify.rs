//! The walker's view of elastic buffers (docs/INVARIANTS.md).

use crate::place::Place;
use crate::places::Places;

use super::body::Body;

/// Walks every elastic buffer of a pool. Sums are checked only for places of which no thread has
/// memory in its hands.
pub(crate) fn buffers(places: &Places) -> Result<(), String> {
    let before: Vec<_> = places.sites().map(|site| site.depot.carries.settled()).collect();
    let booked: Vec<_> = places.sites().map(|site| site.depot.elastic_bytes()).collect();
    let mut found: Vec<u64> = vec![0; before.len()];
    for body in places.bodies() {
        let name = format!("elastic buffer at {:#x}", body.address());
        for (place, bytes) in pieces(&body).map_err(|text| format!("{name}: {text}"))? {
            match places.sites().position(|site| site.place == place) {
                Some(index) => found[index] += bytes,
                None => return Err(format!("I27: {name}: a piece lies on {place}, unknown here")),
            }
        }
    }
    for (index, site) in places.sites().enumerate() {
        let quiet = before[index].is_some() && site.depot.carries.settled() == before[index];
        if quiet && found[index] != booked[index] {
            return Err(format!(
                "I3: {}: elastic buffers hold {} bytes, {} are on the books",
                site.place, found[index], booked[index]
            ));
        }
    }
    hosts(places, &before)
}

/// The law of host memory: every byte owned is in one place.
fn hosts(places: &Places, carries: &[Option<u64>]) -> Result<(), String> {
    for (index, site) in places.sites().enumerate().filter(|(_, it)| it.place.device().is_none()) {
        let depot = site.depot;
        let found = depot.elastic_bytes() + depot.leaving.bytes() + depot.stock.lock().bytes();
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

/// What a buffer holds, by piece.
fn pieces(body: &Body) -> Result<Vec<(Place, u64)>, String> {
    let state = body.state();
    let chunk_bytes = body.shape.chunk_bytes;
    let mut found = Vec::with_capacity(state.pieces.len());
    for (slot, standing) in &state.pieces {
        let offset = u64::from(*slot) * chunk_bytes;
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
        found.push((standing.place, chunk_bytes));
    }
    found.extend(state.incoming.iter().map(|(place, bytes)| (*place, *bytes)));
    if let Some(quota) = &body.shape.quota
        && quota.booked_bytes() > quota.limit_bytes()
    {
        return Err(format!("I2: the quota is passed: {quota:?}"));
    }
    Ok(found)
}
