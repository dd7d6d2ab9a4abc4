//! [`Lengths`]: the requests of a load, each told by a seed and its number alone.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rand_distr::{Distribution, LogNormal};

use crate::model::VOCABULARY;

/// Prompts and answers of log-normal lengths, as those of chats roughly are.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    seed: u64,
    prompt: LogNormal<f64>,
    output: LogNormal<f64>,
    max_tokens: u32,
}

/// Lengths that cannot be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field} = {value}: expected {expected}")]
pub struct BadLengths {
    field: &'static str,
    value: f64,
    expected: &'static str,
}

/// One request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Tokens to answer with.
    pub max_tokens: u32,
}

impl Lengths {
    /// Medians in tokens; `sigma` is the deviation of the logarithm, 0 for all alike. A request has at
    /// most `max_tokens` in all.
    ///
    /// # Errors
    /// A median of 0, a negative or infinite sigma, room for less than two tokens.
    pub fn new(
        seed: u64,
        prompt_tokens: u32,
        output_tokens: u32,
        sigma: f64,
        max_tokens: u32,
    ) -> Result<Lengths, BadLengths> {
        let bad = |field, value, expected| BadLengths { field, value, expected };
        let log_normal = |field, median: u32| match median {
            0 => Err(bad(field, 0.0, "at least 1")),
            _ => LogNormal::new(f64::from(median).ln(), sigma)
                .map_err(|_| bad("sigma", sigma, "a number from 0 on")),
        };
        if max_tokens < 2 {
            return Err(bad("max_tokens", f64::from(max_tokens), "at least 2"));
        }
        if !(0.0..=10.0).contains(&sigma) {
            return Err(bad("sigma", sigma, "0 to 10"));
        }
        let prompt = log_normal("prompt_tokens", prompt_tokens)?;
        let output = log_normal("output_tokens", output_tokens)?;
        Ok(Lengths { seed, prompt, output, max_tokens })
    }

    /// The request with this number.
    pub fn nth(&self, number: u64) -> Wanted {
        let seed = self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(number);
        let mut rng = StdRng::seed_from_u64(seed);
        let mut length = |of: &LogNormal<f64>, max: u32| {
            // A conversion saturates.
            (of.sample(&mut rng).round() as u32).clamp(1, max)
        };
        let prompt_tokens = length(&self.prompt, self.max_tokens - 1);
        let max_tokens = length(&self.output, self.max_tokens - prompt_tokens);
        let prompt = (0..prompt_tokens).map(|_| rng.next_u32() % VOCABULARY).collect();
        Wanted { prompt, max_tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_told_by_its_seed_and_number() {
        let lengths = |seed| Lengths::new(seed, 100, 50, 0.8, 4096).unwrap();
        assert_eq!(lengths(1).nth(7), lengths(1).nth(7));
        assert_ne!(lengths(1).nth(7), lengths(2).nth(7));
        assert_ne!(lengths(1).nth(7), lengths(1).nth(8));
    }

    #[test]
    fn half_are_shorter_than_the_median_and_none_too_long() {
        let lengths = Lengths::new(3, 100, 50, 1.0, 300).unwrap();
        let wanted: Vec<Wanted> = (0..1000).map(|number| lengths.nth(number)).collect();
        let shorter = wanted.iter().filter(|it| it.prompt.len() < 100).count();
        assert!((450..550).contains(&shorter), "{shorter}");
        let total = |it: &Wanted| it.prompt.len() as u32 + it.max_tokens;
        assert!(wanted.iter().all(|it| total(it) <= 300 && it.max_tokens > 0));
        assert!(wanted.iter().flat_map(|it| &it.prompt).all(|token| *token < VOCABULARY));
        let alike = Lengths::new(3, 100, 50, 0.0, 300).unwrap().nth(1);
        assert_eq!((alike.prompt.len(), alike.max_tokens), (100, 50));
    }

    #[test]
    fn lengths_that_cannot_be_are_refused() {
        let error = Lengths::new(1, 0, 5, 1.0, 100).unwrap_err();
        assert_eq!(error.to_string(), "prompt_tokens = 0: expected at least 1");
        assert!(Lengths::new(1, 5, 5, -1.0, 100).is_err());
        assert!(Lengths::new(1, 5, 5, f64::NAN, 100).is_err());
        assert!(Lengths::new(1, 5, 5, 1.0, 1).is_err());
    }
}
