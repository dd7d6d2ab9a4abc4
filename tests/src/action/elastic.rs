//! [`ElasticAction`]: one step with an elastic buffer.

use std::fmt;

use vmm_pool::Place;
use vmm_sys::{Access, DeviceId};

use super::Words;

/// What a device may do, by name.
const ACCESSES: [(&str, Access); 3] =
    [("none", Access::None), ("read", Access::Read), ("write", Access::ReadWrite)];

/// One step. Buffers are numbered apart from those of lanes; slots are chunks, from the start of
/// the buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are what their names say; units are in the variants")]
pub enum ElasticAction {
    /// Makes a buffer of so many slots; the chunk is in bytes, or automatic, the quota in slots.
    Build { buffer: u32, device: u32, slots: u32, chunk: Option<u64>, tag: u32, quota: Option<u32> },
    /// Commits slots with memory of a place.
    Commit { buffer: u32, place: Place, first: u32, slots: u32 },
    /// Asks for growth in the background, and waits for it.
    Ahead { buffer: u32, slots: u32 },
    /// Takes the memory of slots away.
    Decommit { buffer: u32, first: u32, slots: u32 },
    /// Has the chunks of slots stand from another slot on too.
    Share { buffer: u32, first: u32, slots: u32, to: u32 },
    /// Gives shared slots chunks of their own.
    Unshare { buffer: u32, first: u32, slots: u32 },
    /// Copies a slot to another one, on a stream.
    Copy { buffer: u32, stream: u32, from: u32, to: u32 },
    /// Says what a device may do.
    Grant { buffer: u32, device: u32, access: Access },
    /// A kernel on the stream writes a slot, under a guard.
    Use { buffer: u32, stream: u32, slot: u32 },
    /// Takes a guard and keeps it.
    Begin { buffer: u32, stream: u32 },
    /// Drops the oldest guard.
    End { buffer: u32 },
    /// Moves everything, or a part (first slot and number of slots), now or in the background.
    /// Then streams that are held are let go only once the move waits for them, and `late` begins to
    /// use the buffer meanwhile.
    Move { buffer: u32, to: Place, part: Option<(u32, u32)>, ahead: bool, late: Option<u32> },
    /// Puts all buffers with the tag to sleep, contents kept or dropped.
    Sleep { tag: u32, kept: bool },
    /// Wakes them.
    Wake { tag: u32 },
    /// Checks the contents, as a device reads them.
    Check { buffer: u32, device: u32 },
    /// Checks the contents and drops the buffer, and then its guards.
    Drop { buffer: u32 },
}

/// A place as scripts name it.
struct Name(Place);

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Place::Device(DeviceId(device)) => write!(f, "d{device}"),
            Place::HostNuma(node) => write!(f, "n{node}"),
        }
    }
}

impl fmt::Display for ElasticAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use ElasticAction as A;
        match self {
            A::Build { buffer, device, slots, chunk, tag, quota } => {
                write!(f, "build e{buffer} d{device} {slots} t{tag}")?;
                chunk.map_or(Ok(()), |chunk| write!(f, " chunk {chunk}"))?;
                quota.map_or(Ok(()), |quota| write!(f, " quota {quota}"))
            }
            A::Commit { buffer, place, first, slots } => {
                write!(f, "commit e{buffer} {} {first} {slots}", Name(*place))
            }
            A::Ahead { buffer, slots } => write!(f, "ahead e{buffer} {slots}"),
            A::Decommit { buffer, first, slots } => {
                write!(f, "decommit e{buffer} {first} {slots}")
            }
            A::Share { buffer, first, slots, to } => {
                write!(f, "share e{buffer} {first} {slots} {to}")
            }
            A::Unshare { buffer, first, slots } => write!(f, "unshare e{buffer} {first} {slots}"),
            A::Copy { buffer, stream, from, to } => {
                write!(f, "copy e{buffer} s{stream} {from} {to}")
            }
            A::Grant { buffer, device, access } => {
                let (name, _) = ACCESSES.iter().find(|it| it.1 == *access).unwrap_or(&ACCESSES[0]);
                write!(f, "grant e{buffer} d{device} {name}")
            }
            A::Use { buffer, stream, slot } => write!(f, "use e{buffer} s{stream} {slot}"),
            A::Begin { buffer, stream } => write!(f, "begin e{buffer} s{stream}"),
            A::End { buffer } => write!(f, "end e{buffer}"),
            A::Move { buffer, to, part, ahead, late } => {
                write!(f, "move e{buffer} {}", Name(*to))?;
                part.map_or(Ok(()), |(first, slots)| write!(f, " part {first} {slots}"))?;
                f.write_str(if *ahead { " ahead" } else { "" })?;
                late.map_or(Ok(()), |stream| write!(f, " late s{stream}"))
            }
            A::Sleep { tag, kept } => {
                write!(f, "sleep t{tag} {}", if *kept { "kept" } else { "dropped" })
            }
            A::Wake { tag } => write!(f, "wake t{tag}"),
            A::Check { buffer, device } => write!(f, "check e{buffer} d{device}"),
            A::Drop { buffer } => write!(f, "drop e{buffer}"),
        }
    }
}

impl ElasticAction {
    /// Reads what follows the word `elastic`.
    pub(super) fn read(words: &mut Words<'_>) -> Result<ElasticAction, String> {
        use ElasticAction as A;
        let name = words.word()?;
        if let "sleep" | "wake" = name {
            let tag = words.named('t')?;
            return Ok(match name {
                "wake" => A::Wake { tag },
                _ if words.take_if("kept") => A::Sleep { tag, kept: true },
                _ => {
                    words.expect("dropped")?;
                    A::Sleep { tag, kept: false }
                }
            });
        }
        let buffer = words.named('e')?;
        Ok(match name {
            "build" => A::Build {
                buffer,
                device: words.named('d')?,
                slots: words.number()?,
                tag: words.named('t')?,
                chunk: words.take_if("chunk").then(|| words.number()).transpose()?,
                quota: words.take_if("quota").then(|| words.number()).transpose()?,
            },
            "commit" => A::Commit {
                buffer,
                place: words.place()?,
                first: words.number()?,
                slots: words.number()?,
            },
            "ahead" => A::Ahead { buffer, slots: words.number()? },
            "decommit" => A::Decommit { buffer, first: words.number()?, slots: words.number()? },
            "share" => A::Share {
                buffer,
                first: words.number()?,
                slots: words.number()?,
                to: words.number()?,
            },
            "unshare" => A::Unshare { buffer, first: words.number()?, slots: words.number()? },
            "copy" => A::Copy {
                buffer,
                stream: words.named('s')?,
                from: words.number()?,
                to: words.number()?,
            },
            "grant" => A::Grant { buffer, device: words.named('d')?, access: words.access()? },
            "use" => A::Use { buffer, stream: words.named('s')?, slot: words.number()? },
            "begin" => A::Begin { buffer, stream: words.named('s')? },
            "end" => A::End { buffer },
            "move" => A::Move {
                buffer,
                to: words.place()?,
                part: words.take_if("part").then(|| words.pair()).transpose()?,
                ahead: words.take_if("ahead"),
                late: words.take_if("late").then(|| words.named('s')).transpose()?,
            },
            "check" => A::Check { buffer, device: words.named('d')? },
            "drop" => A::Drop { buffer },
            other => return Err(words.wrong("the name of an elastic action", other)),
        })
    }
}

impl Words<'_> {
    fn place(&mut self) -> Result<Place, String> {
        let word = self.word()?;
        let number = |letter| word.strip_prefix(letter).and_then(|rest| rest.parse().ok());
        match (number('d'), number('n')) {
            (Some(device), _) => Ok(Place::Device(DeviceId(device))),
            (_, Some(node)) => Ok(Place::HostNuma(node)),
            _ => Err(self.wrong("d or n and a number", word)),
        }
    }

    fn access(&mut self) -> Result<Access, String> {
        let word = self.word()?;
        let access = ACCESSES.iter().find(|(name, _)| *name == word);
        access.map(|(_, it)| *it).ok_or_else(|| self.wrong("none, read or write", word))
    }

    fn pair(&mut self) -> Result<(u32, u32), String> {
        Ok((self.number()?, self.number()?))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Action;
    use super::ElasticAction as A;
    use super::*;

    #[test]
    fn every_elastic_action_is_read_as_it_was_written() {
        let (device, host) = (Place::Device(DeviceId(2)), Place::HostNuma(0));
        let actions = [
            A::Build { buffer: 1, device: 0, slots: 4, chunk: None, tag: 0, quota: Some(3) },
            A::Build { buffer: 1, device: 0, slots: 4, chunk: Some(4096), tag: 2, quota: None },
            A::Commit { buffer: 1, place: host, first: 2, slots: 3 },
            A::Ahead { buffer: 1, slots: 9 },
            A::Decommit { buffer: 1, first: 0, slots: 1 },
            A::Share { buffer: 1, first: 2, slots: 3, to: 7 },
            A::Unshare { buffer: 1, first: 2, slots: 3 },
            A::Copy { buffer: 1, stream: 4, from: 2, to: 5 },
            A::Grant { buffer: 1, device: 1, access: Access::Read },
            A::Grant { buffer: 1, device: 1, access: Access::None },
            A::Use { buffer: 1, stream: 3, slot: 2 },
            A::Begin { buffer: 1, stream: 3 },
            A::End { buffer: 1 },
            A::Move { buffer: 1, to: device, part: None, ahead: false, late: None },
            A::Move { buffer: 1, to: host, part: Some((1, 2)), ahead: true, late: Some(4) },
            A::Sleep { tag: 1, kept: true },
            A::Sleep { tag: 1, kept: false },
            A::Wake { tag: 1 },
            A::Check { buffer: 1, device: 0 },
            A::Drop { buffer: 1 },
        ];
        for action in actions.map(Action::Elastic) {
            assert_eq!(action.to_string().parse(), Ok(action));
        }
    }

    #[test]
    fn what_cannot_be_read_says_what_was_expected() {
        for (line, expected) in [
            ("elastic", "one more word"),
            ("elastic fly e1", "the name of an elastic action"),
            ("elastic move e1 x0", "d or n and a number"),
            ("elastic sleep t1 half", "dropped"),
            ("elastic grant e1 d0 all", "none, read or write"),
            ("elastic drop e1 now", "the end of the line"),
        ] {
            let error = line.parse::<Action>().unwrap_err();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
