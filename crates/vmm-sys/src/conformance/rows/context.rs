//! D-N4: what needs no current context.

use std::thread;

use crate::types::GranularityKind;

use super::super::bench::Bench;
use super::super::check::{Answers, answer, ensure};
use super::super::outcome::{Outcome, Step};
use super::super::scratch::Scratch;

/// D-N4: the VMM calls on a thread that has no current context.
pub(super) fn d_n4(bench: &Bench) -> Outcome {
    bench.check(|s| {
        thread::scope(|scope| match scope.spawn(|| without_context(s)).join() {
            Ok(text) => text,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })
}

fn without_context(s: &Scratch<'_>) -> Step<String> {
    let (g, device) = (s.g(), s.device());
    let before = s.driver().context_current()?;
    ensure(before.is_none(), || format!("a fresh thread has the current context {before:?}"))?;
    let mut answers = Answers::default();
    let mut works = |name: &str, came: String| answers.expect(name, came, "OK");
    let granularity = s.driver().granularity(&s.props(), GranularityKind::Recommended);
    works("granularity", answer(&granularity));
    let (address, chunk) = (s.range(2 * g)?, s.chunk(g, device)?);
    works("map", answer(&s.map(address, g, 0, chunk)));
    works("set access", answer(&s.grant(address, g, &[device])));
    works("get access", answer(&s.access_of(address, device)));
    works("properties", answer(&s.properties(chunk)));
    works("retain", answer(&s.retain(address)));
    works("address range", answer(&s.driver().address_range(device, address)));
    works("pointer attributes", answer(&s.driver().pointer_info(address)));
    works("unmap", answer(&s.unmap(address, g)));
    works("release", answer(&s.release(chunk)));
    works("free the range", answer(&s.address_free(address, 2 * g)));
    let after = format!("{:?}", s.driver().context_current()?);
    answers.expect("current context afterwards", after, "None");
    answers.told()
}
