//! Commands of the pages, and whether what they name exists.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command as Process;

use serde_json::Value;

use crate::page::{Fence, Page, root};

/// A command as a page has it, without a prompt and without the comment behind it.
#[derive(Debug)]
pub(crate) struct Command {
    /// `PAGE:LINE`.
    pub(crate) place: String,
    pub(crate) text: String,
}

/// Programs of the workspace that pages call by their names.
const PROGRAMS: [&str; 4] = ["vmm-pool", "vmm-server", "vmm-load", "vmm-serve-compare"];
/// Programs whose first word is a command with options of its own.
const WITH_COMMANDS: [&str; 2] = ["vmm-pool", "fidelity"];

impl Command {
    /// The commands of a page: lines of its shell blocks, and code between backticks that is one.
    pub(crate) fn of(page: &Page) -> Vec<Command> {
        let mut found = Vec::new();
        for fence in &page.fences {
            for (nth, text) in lines(fence) {
                found.push(Command { place: format!("{}:{}", page.path, fence.line + nth), text });
            }
        }
        for span in page.spans.iter().filter(|span| is_command(&span.text)) {
            let place = format!("{}:{}", page.path, span.line);
            found.push(Command { place, text: span.text.clone() });
        }
        found
    }

    /// The words behind the variables.
    pub(crate) fn words(&self) -> Vec<&str> {
        words(&self.text).into_iter().skip_while(|word| is_variable(word)).collect()
    }

    /// Whether it only names a program or a script.
    pub(crate) fn is_a_name(&self) -> bool {
        self.text.split_whitespace().count() == 1
    }
}

/// The words of a line; blanks between quotes part none.
fn words(text: &str) -> Vec<&str> {
    let mut quote = None;
    let parts = text.split(move |c: char| {
        quote = match quote {
            None if c == '"' || c == '\'' => Some(c),
            Some(open) if open == c => None,
            other => other,
        };
        quote.is_none() && c.is_whitespace()
    });
    parts.filter(|word| !word.is_empty()).collect()
}

/// `NAME=value`.
fn is_variable(word: &str) -> bool {
    let name = word.split_once('=').map(|(name, _)| name);
    name.is_some_and(|name| name.chars().all(|c| c.is_ascii_uppercase() || c == '_'))
}

fn is_command(text: &str) -> bool {
    let Some(first) = words(text).into_iter().find(|word| !is_variable(word)) else { return false };
    let script = first.ends_with(".sh") || first.ends_with(".py");
    let called = ["cargo", "python3", "python", "bash", "rustup"].contains(&first);
    script || (called && text != first) || PROGRAMS.contains(&first)
}

/// The commands of a shell block, each with its line in the block. Of a session, what was typed.
fn lines(fence: &Fence) -> Vec<(usize, String)> {
    let numbered = fence.text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
    let typed = numbered.filter_map(|(at, line)| match fence.language.as_str() {
        "sh" => Some((at, line)),
        "console" => line.strip_prefix("$ ").map(|line| (at, line)),
        _ => None,
    });
    let commands = typed.map(|(at, line)| {
        let command = line.split(" #").next().unwrap_or_default();
        (at, if command.starts_with('#') { "" } else { command.trim() }.to_owned())
    });
    commands.filter(|(_, command)| !command.is_empty()).collect()
}

/// What there is to be named.
pub(crate) struct Workspace {
    packages: HashMap<String, Value>,
    helps: HashMap<String, String>,
}

impl Workspace {
    pub(crate) fn read() -> Workspace {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut metadata = Process::new(cargo);
        metadata.args(["metadata", "--no-deps", "--offline", "--format-version", "1"]);
        let output = metadata.current_dir(root()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let all: Value = serde_json::from_slice(&output.stdout).unwrap();
        let named = all["packages"].as_array().unwrap().iter();
        let packages =
            named.map(|package| (package["name"].as_str().unwrap().into(), package.clone()));
        Workspace { packages: packages.collect(), helps: HashMap::new() }
    }

    /// Why the command cannot be meant: a package, a target, a feature, an option or a script that is
    /// not there.
    pub(crate) fn check(&mut self, command: &Command) -> Result<(), String> {
        let words = command.words();
        let folder = Path::new(&command.place).parent().unwrap();
        match words[..] {
            ["cargo", ref rest @ ..] => self.check_cargo(rest),
            ["bash", script, ..] => script_of(folder, script).map(drop),
            ["python3" | "python", script, ..] => script_of(folder, script).map(drop),
            [program, ref rest @ ..] if PROGRAMS.contains(&program) => {
                let package = if program == "vmm-pool" { "vmm-pool-cli" } else { "vmm-server" };
                self.check_options(package, program, rest)
            }
            [script, ..] if script.contains('.') => script_of(folder, script).and_then(executable),
            _ => Err("not known what this is".to_owned()),
        }
    }

    fn check_cargo(&mut self, words: &[&str]) -> Result<(), String> {
        let (own, passed) = match words.iter().position(|word| *word == "--") {
            Some(at) => (&words[..at], &words[at + 1..]),
            None => (words, &[][..]),
        };
        let [task, options @ ..] = own else { return Err("no task".to_owned()) };
        if !["run", "test", "bench", "build", "check", "clippy", "doc", "fmt"].contains(task) {
            return Err(format!("cargo {task}: not known"));
        }
        let (mut package, mut target, mut features) = (None, None, String::new());
        let mut options = options.iter();
        while let Some(option) = options.next() {
            let mut value = || options.next().ok_or(format!("{option}: no value"));
            match *option {
                "-p" => package = Some(*value()?),
                "--bin" | "--example" | "--test" | "--bench" => {
                    target = Some((option.trim_start_matches('-'), *value()?));
                }
                "--features" => features = value()?.replace(',', " "),
                "--release"
                | "--workspace"
                | "--no-default-features"
                | "--bins"
                | "--benches"
                | "--doc" => {}
                // The tests whose names have it.
                filter if *task == "test" && !filter.starts_with('-') => {}
                other => return Err(format!("{other}: not known")),
            }
        }
        let Some(package) = package else { return Ok(()) };
        let program = self.target(package, target, &features)?;
        match (*task, program) {
            ("run", Some(program)) => self.check_options(package, &program, passed),
            ("run", None) => Err(format!("{package}: which of its programs?")),
            _ => Ok(()),
        }
    }

    /// The program that a command runs, if it is one.
    fn target(
        &self,
        package: &str,
        target: Option<(&str, &str)>,
        features: &str,
    ) -> Result<Option<String>, String> {
        let found = self.packages.get(package).ok_or(format!("no package {package}"))?;
        for feature in features.split_whitespace() {
            if found["features"].get(feature).is_none() {
                return Err(format!("{package} has no feature {feature}"));
            }
        }
        let targets = || found["targets"].as_array().unwrap().iter();
        let Some((kind, name)) = target else {
            let bins: Vec<_> = targets().filter(|target| target["kind"][0] == "bin").collect();
            let [only] = bins[..] else { return Ok(None) };
            return Ok(only["name"].as_str().map(str::to_owned));
        };
        let is = |target: &&Value| target["kind"][0] == kind && target["name"] == name;
        let target = targets().find(is).ok_or(format!("{package} has no {kind} {name}"))?;
        // A package that takes itself for its tests has the features that these name.
        let of_tests = found["dependencies"].as_array().unwrap().iter();
        let mut own = of_tests.filter(|other| other["name"] == package && other["kind"] == "dev");
        let by_tests = own.next().map(|own| own["features"].to_string()).unwrap_or_default();
        for feature in target["required-features"].as_array().into_iter().flatten() {
            let feature = feature.as_str().unwrap();
            let given = features.split_whitespace().any(|given| given == feature);
            if !given && !by_tests.contains(feature) {
                return Err(format!("{kind} {name} needs the feature {feature}"));
            }
        }
        Ok(["bin", "example"].contains(&kind).then(|| name.to_owned()))
    }

    /// Each option must be in what the program says of itself, or its command does.
    fn check_options(
        &mut self,
        package: &str,
        program: &str,
        words: &[&str],
    ) -> Result<(), String> {
        let has_commands = WITH_COMMANDS.contains(&program);
        if !has_commands && !words.iter().any(|word| word.starts_with("--")) {
            return Ok(());
        }
        let sub = words.first().filter(|word| has_commands && !word.starts_with('-'));
        let key = format!("{program} {}", sub.unwrap_or(&""));
        if !self.helps.contains_key(&key) {
            let mut asked = Process::new(built(package, program)?);
            asked.args(sub).arg("--help").env("LLVM_PROFILE_FILE", "/dev/null");
            let output = asked.output().map_err(|error| error.to_string())?;
            let said = [output.stdout, output.stderr].concat();
            let said = String::from_utf8_lossy(&said).into_owned();
            if said.contains("unrecognized subcommand") {
                return Err(format!("{program} has no command {sub:?}"));
            }
            self.helps.insert(key.clone(), said);
        }
        let help = &self.helps[&key];
        for word in words.iter().filter(|word| word.starts_with("--")) {
            let option = word.split('=').next().unwrap();
            let ends = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '-');
            if !help.match_indices(option).any(|(at, _)| ends(&help[at + option.len()..])) {
                return Err(format!("{key} says nothing of {option}"));
            }
        }
        Ok(())
    }
}

/// A program of the workspace, where cargo put it beside this test. Whoever tests this package alone may
/// not have it yet.
pub(crate) fn built(package: &str, program: &str) -> Result<PathBuf, String> {
    let test = std::env::current_exe().map_err(|error| error.to_string())?;
    let profile = test.parent().unwrap().parent().unwrap();
    let places = || [profile.join(program), profile.join("examples").join(program)];
    if let Some(found) = places().into_iter().find(|path| path.is_file()) {
        return Ok(found);
    }
    eprintln!("{program} is not built yet: cargo builds it");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Process::new(cargo);
    build.args(["build", "--quiet", "-p", package, "--bins", "--examples"]).current_dir(root());
    build.arg("--target-dir").arg(profile.parent().unwrap());
    if profile.ends_with("release") {
        build.arg("--release");
    }
    let status = build.status().map_err(|error| error.to_string())?;
    let found = places().into_iter().find(|path| path.is_file());
    found.ok_or(format!("{package} was built ({status}), and has no {program}"))
}

/// A script by its path from the root, from the page's folder, or by its name if only one has it.
fn script_of(folder: &Path, script: &str) -> Result<PathBuf, String> {
    let places = [root().join(script), root().join(folder).join(script)];
    if let Some(found) = places.into_iter().find(|path| path.is_file()) {
        return Ok(found);
    }
    let all = crate::page::files(&[script]);
    let is = |path: &&String| Path::new(path).file_name().is_some_and(|name| name == script);
    let named: Vec<_> = all.iter().filter(is).collect();
    match named[..] {
        [only] => Ok(root().join(only)),
        _ => Err(format!("no script {script}")),
    }
}

fn executable(path: PathBuf) -> Result<(), String> {
    let is_shell = path.extension().is_some_and(|extension| extension == "sh");
    let mode = fs::metadata(&path).map_err(|error| error.to_string())?.permissions().mode();
    if is_shell && mode & 0o111 == 0 {
        return Err(format!("{} cannot be executed", path.display()));
    }
    Ok(())
}
