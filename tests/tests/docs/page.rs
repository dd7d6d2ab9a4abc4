//! The pages of the repository, taken apart: fenced blocks, code between backticks, links.

use std::fs;
use std::path::{Path, PathBuf};

/// The root of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Whether files below are the repository's own: no build output, nothing hidden.
fn is_own(name: &str) -> bool {
    name != "target" && name != "shared" && !name.starts_with('.')
}

/// Every file below the root whose name ends with one of these, by its path from the root.
pub(crate) fn files(endings: &[&str]) -> Vec<String> {
    fn walk(folder: &Path, endings: &[&str], into: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
            if path.is_dir() && is_own(&name) {
                walk(&path, endings, into);
            } else if path.is_file() && endings.iter().any(|ending| name.ends_with(ending)) {
                into.push(path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    let mut found = Vec::new();
    walk(&root(), endings, &mut found);
    found.sort();
    found
}

/// A block between fences.
pub(crate) struct Fence {
    pub(crate) line: usize,
    /// What stands behind the first fence.
    pub(crate) language: String,
    pub(crate) text: String,
}

/// What stands between backticks, on one line.
pub(crate) struct Span {
    pub(crate) line: usize,
    pub(crate) text: String,
}

pub(crate) struct Page {
    pub(crate) path: String,
    pub(crate) text: String,
    pub(crate) fences: Vec<Fence>,
    pub(crate) spans: Vec<Span>,
    /// Outside of code: where links go, and from which line.
    pub(crate) links: Vec<(usize, String)>,
}

/// Every page of the repository.
pub(crate) fn pages() -> Vec<Page> {
    files(&[".md"]).into_iter().map(Page::read).collect()
}

impl Page {
    fn read(path: String) -> Page {
        let text = fs::read_to_string(root().join(&path)).unwrap();
        let mut page =
            Page { path, text, fences: Vec::new(), spans: Vec::new(), links: Vec::new() };
        let mut fence: Option<Fence> = None;
        let (mut paragraph, mut began) = (String::new(), 1);
        for (at, line) in page.text.clone().lines().enumerate() {
            let marks = line.trim_start().strip_prefix("```");
            match (&mut fence, marks) {
                (None, Some(language)) => {
                    page.take_paragraph(&paragraph, began);
                    (paragraph, began) = (String::new(), at + 2);
                    let language = language.trim().to_owned();
                    fence = Some(Fence { line: at + 1, language, text: String::new() });
                }
                (Some(_), Some(_)) => {
                    page.fences.extend(fence.take());
                    began = at + 2;
                }
                (Some(fence), None) => fence.text += &format!("{line}\n"),
                (None, None) if line.trim().is_empty() => {
                    page.take_paragraph(&paragraph, began);
                    (paragraph, began) = (String::new(), at + 2);
                }
                (None, None) => paragraph += &format!("{line}\n"),
            }
        }
        assert!(fence.is_none(), "{}: a fence has no end", page.path);
        page.take_paragraph(&paragraph, began);
        page
    }

    fn take_paragraph(&mut self, paragraph: &str, began: usize) {
        let mut line = began;
        let pieces: Vec<&str> = paragraph.split('`').collect();
        assert!(pieces.len() % 2 == 1, "{}:{began}: a backtick has no partner", self.path);
        let mut plain = String::new();
        for (nth, piece) in pieces.iter().enumerate() {
            if nth % 2 == 1 {
                let words: Vec<&str> = piece.split_whitespace().collect();
                self.spans.push(Span { line, text: words.join(" ") });
                plain.push('`');
            } else {
                plain += piece;
            }
            line += piece.matches('\n').count();
        }
        for (at, _) in plain.match_indices("](") {
            let to = plain[at + 2..].split(')').next().unwrap();
            let line = began + plain[..at].matches('\n').count();
            self.links.push((line, to.to_owned()));
        }
    }

    /// The names that links of other pages can have behind `#`.
    pub(crate) fn anchors(&self) -> impl Iterator<Item = String> {
        let heads = self.text.lines().filter(|line| line.starts_with('#'));
        heads.map(|head| {
            let words = head.trim_start_matches('#').trim().to_lowercase();
            let kept = words.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
    }
}
