//! [`Script`]: a whole run in text, the setup in the first line and an action in each other.

use std::fmt;
use std::str::FromStr;

use crate::action::Action;
use crate::setup::Setup;

/// A run: printed when it fails, and repeated from that text.
#[derive(Clone, Debug, PartialEq)]
pub struct Script {
    /// What it is run on.
    pub setup: Setup,
    /// What is done, in order.
    pub actions: Vec<Action>,
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.setup)?;
        self.actions.iter().try_for_each(|action| writeln!(f, "{action}"))
    }
}

impl FromStr for Script {
    type Err = String;

    /// Empty lines and what follows a `#` mean nothing.
    fn from_str(text: &str) -> Result<Script, String> {
        let lines = text.lines().enumerate().map(|(index, line)| {
            let line = line.split_once('#').map_or(line, |(before, _)| before);
            (index + 1, line.trim())
        });
        let mut lines = lines.filter(|(_, line)| !line.is_empty());
        let (number, first) = lines.next().ok_or("an empty script: expected a setup line")?;
        let setup = first.parse().map_err(|error| format!("line {number}: {error}"))?;
        let actions = lines
            .map(|(number, line)| line.parse().map_err(|error| format!("line {number}: {error}")))
            .collect::<Result<_, String>>()?;
        Ok(Script { setup, actions })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_read_as_it_was_written_and_errors_name_their_line() {
        let text = "setup devices=1\n\n# a comment\nstream s0 d0\nalloc b0 s0 77 align 512\n";
        let script: Script = text.parse().unwrap();
        assert_eq!(script.actions.len(), 2);
        assert_eq!(script.to_string().parse(), Ok(script));
        let error = "setup\nstream s0 d0\nfree 1".parse::<Script>().unwrap_err();
        assert!(error.starts_with("line 3: "), "{error}");
        assert!("# nothing".parse::<Script>().is_err());
    }
}
