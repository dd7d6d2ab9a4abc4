//! The pages are true to what is there: each command runs, or has a reason why not; each example is
//! compiled; links lead somewhere, and variables are read by somebody.

#![allow(clippy::unwrap_used, reason = "helpers of tests are not seen as tests")]

mod command;
mod lists;
mod page;
mod programs;

use std::collections::HashSet;
use std::fs;

use command::{Command, Workspace};
use lists::{FOREIGN, IGNORED_RUST, NOT_RUN, RUN};
use page::{Page, files, pages, root};

/// All commands of all pages.
fn commands() -> Vec<Command> {
    pages().iter().flat_map(Command::of).collect()
}

/// A command that nobody has judged is a fault, and so is a judgement about none.
#[test]
fn every_command_is_run_or_has_a_reason_why_not() {
    let mut listed: Vec<&str> = RUN.iter().map(|run| run.command).collect();
    for (reason, texts) in NOT_RUN.iter().chain(FOREIGN) {
        for word in reason.split([' ', ':', ',', ';']).filter(|word| word.contains('/')) {
            assert!(root().join(word).exists(), "no {word}, which is a reason");
        }
        listed.extend(*texts);
    }
    let known: HashSet<&str> = listed.iter().copied().collect();
    assert_eq!(known.len(), listed.len(), "a command is listed twice");
    let all = commands();
    assert!(all.len() > 60, "{} commands", all.len());
    let judged = |command: &&Command| command.is_a_name() || known.contains(command.text.as_str());
    let new: Vec<_> = all.iter().filter(|command| !judged(command)).collect();
    assert!(new.is_empty(), "neither run nor with a reason (tests/tests/docs/lists.rs): {new:#?}");
    let texts: HashSet<&str> = all.iter().map(|command| command.text.as_str()).collect();
    let gone: Vec<_> = known.difference(&texts).collect();
    assert!(gone.is_empty(), "listed, and on no page: {gone:#?}");
    // What the tour prints when it is run here, and what the page promises.
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let tour = RUN.iter().find(|run| run.command == "vmm-pool tour").unwrap();
    let steps = tour.prints.split_whitespace().nth(1).unwrap();
    assert!(readme.contains(&format!("each of its {steps} steps")), "README.md: {steps} steps");
}

#[test]
fn what_commands_name_exists() {
    let foreign: HashSet<&str> = FOREIGN.iter().flat_map(|(_, texts)| *texts).copied().collect();
    let mut workspace = Workspace::read();
    let mut wrong = Vec::new();
    for command in commands().iter().filter(|command| !foreign.contains(command.text.as_str())) {
        if let Err(why) = workspace.check(command) {
            wrong.push(format!("{}: {}: {why}", command.place, command.text));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_block_says_what_it_is_and_rust_is_compiled() {
    let languages = ["sh", "console", "rust", "rust,no_run", "toml", "text", "c", "cpp", "python"];
    // Pages that the documentation of a package includes when its examples are tested.
    let sources: Vec<(String, String)> = files(&[".rs"])
        .into_iter()
        .map(|path| (path.clone(), fs::read_to_string(root().join(&path)).unwrap()))
        .filter(|(path, text)| text.contains("cfg(doctest)") || path == "tests/src/pages.rs")
        .collect();
    let mut ignored = Vec::new();
    for page in pages() {
        for fence in &page.fences {
            let place = format!("{}:{}", page.path, fence.line);
            if fence.language == "rust,ignore" {
                ignored.push(page.path.clone());
                continue;
            }
            assert!(languages.contains(&fence.language.as_str()), "{place}: {}", fence.language);
            let included = format!("/{}\"", page.path);
            let compiled = sources.iter().any(|(_, text)| text.contains(&included));
            assert!(compiled || !fence.language.starts_with("rust"), "{place}: nobody compiles it");
        }
    }
    assert_eq!(ignored, IGNORED_RUST.iter().map(|(page, _)| *page).collect::<Vec<_>>());
}

#[test]
fn python_on_the_pages_can_be_parsed() {
    let blocks: Vec<String> = pages()
        .iter()
        .flat_map(|page| &page.fences)
        .filter(|fence| fence.language == "python")
        .map(|fence| fence.text.clone())
        .collect();
    assert!(!blocks.is_empty());
    let parse = "import ast, json, sys\nfor block in json.loads(sys.argv[1]): ast.parse(block)";
    let argument = serde_json::to_string(&blocks).unwrap();
    match std::process::Command::new("python3").args(["-c", parse, &argument]).output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        Err(error) => println!("skipped: python3: {error}"),
    }
}

#[test]
fn links_lead_somewhere() {
    let pages = pages();
    let find = |path: &str| pages.iter().find(|page| page.path == path);
    let mut wrong = Vec::new();
    let mut seen = 0;
    for page in &pages {
        for (line, link) in page.links.iter().filter(|(_, link)| !link.contains("://")) {
            seen += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.path.clone() } else { beside(page, file) };
            let has_anchor = |page: &Page| page.anchors().any(|name| name == anchor);
            let there = root().join(&target).exists();
            if !there || !anchor.is_empty() && !find(&target).is_some_and(has_anchor) {
                wrong.push(format!("{}:{line}: {link}", page.path));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(seen > 40, "{seen} links");
}

/// The path from the root of what a page calls `file`.
fn beside(page: &Page, file: &str) -> String {
    let mut path: Vec<&str> = page.path.split('/').collect();
    path.pop();
    for part in file.split('/') {
        match part {
            ".." => drop(path.pop()),
            part => path.push(part),
        }
    }
    path.join("/")
}

#[test]
fn every_folder_of_results_is_described() {
    let page = fs::read_to_string(root().join("docs/BENCHMARKS.md")).unwrap();
    let table = page.split("\n## Results\n").nth(1).unwrap();
    for entry in fs::read_dir(root().join("benches/results")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        // Later ones of a day are named by their last letter, behind the first.
        let (first, last) = name.rsplit_once('-').unwrap();
        let by_letter =
            last.len() == 1 && table.contains(first) && table.contains(&format!("`-{last}`"));
        assert!(by_letter || table.contains(&format!("`{name}`")), "no line for {name}");
    }
}

/// `VMM_…` on a page is read, or written, by some source.
#[test]
fn variables_are_in_the_sources() {
    let endings = [".rs", ".sh", ".py", ".h", ".hpp", ".cpp", ".toml"];
    let sources: Vec<String> =
        files(&endings).iter().map(|path| fs::read_to_string(root().join(path)).unwrap()).collect();
    let is_part = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let mut checked = HashSet::new();
    for page in pages() {
        for word in page.text.split(|c: char| !is_part(c)).filter(|word| word.starts_with("VMM_")) {
            if checked.insert(word.to_owned()) {
                let there = sources.iter().any(|text| text.contains(word));
                assert!(there, "{}: nothing knows {word}", page.path);
            }
        }
    }
    assert!(checked.len() > 30, "{checked:?}");
}
