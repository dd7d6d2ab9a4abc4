//! The other process of the soak: it maps what the first offers, and checks it by kernels.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::time::Duration;

use vmm_share::{Access, Address, Import, Importer, ImporterOptions};
use vmm_sys::object::Stream;

use super::board::{Board, Words};
use super::sharing::CHILD_DEVICE;
use super::trouble::{Step, Trouble};
use crate::machine::{DriverChoice, Machine, MachineSpec};

/// How long each step of the other side may take.
const PATIENCE: Duration = Duration::from_secs(30);

struct Side {
    machine: Machine,
    stream: Stream,
    board: Board,
    importer: Importer,
    imports: BTreeMap<String, Import>,
}

/// Does what the lines of the input say, until one says that it is the end.
///
/// # Errors
/// What is wrong, in words.
pub fn serve(choice: DriverChoice, devices: u32, address: &Address) -> Result<(), String> {
    let spec = MachineSpec { devices, ..MachineSpec::default() };
    let machine = Machine::new(choice, spec).map_err(|skip| skip.to_string())?;
    let mut side = Side::new(machine, address).map_err(|trouble| trouble.to_string())?;
    say("ok")?;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(|error| error.to_string())?;
        if line == "end" {
            side.imports.clear();
            return say("ok");
        }
        match side.obey(&line) {
            Ok(()) => say("ok")?,
            Err(Trouble::Refused(_)) => say("again")?,
            Err(Trouble::Wrong(text)) => say(&text.replace('\n', " "))?,
        }
    }
    Err("the first process has ended".to_owned())
}

fn say(answer: &str) -> Result<(), String> {
    let mut out = std::io::stdout();
    writeln!(out, "{answer}").and_then(|()| out.flush()).map_err(|error| error.to_string())
}

impl Side {
    fn new(machine: Machine, address: &Address) -> Result<Side, Trouble> {
        let driver = machine.driver();
        let stream = Stream::create(driver, CHILD_DEVICE)?;
        let board = Board::new(driver, 1, 1)?;
        let options = ImporterOptions::new(driver.clone()).timeout(PATIENCE);
        let importer = Importer::connect(address, options.devices(machine.devices()))?;
        Ok(Side { machine, stream, board, importer, imports: BTreeMap::new() })
    }

    fn obey(&mut self, line: &str) -> Step {
        let mut words = line.split(' ');
        let (order, name) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        match order {
            "open" => {
                let room = words.next().and_then(|text| text.parse().ok());
                let room = room.ok_or_else(|| Trouble::wrong("no length to open"))?;
                let import = self.importer.open_with_room(name, Access::Read, room)?;
                self.imports.insert(name.to_owned(), import);
                Ok(())
            }
            "close" => {
                self.imports.remove(name);
                Ok(())
            }
            "check" => self.check(name, words),
            _ => Err(Trouble::Wrong(format!("no such order: {line}"))),
        }
    }

    fn check<'a>(&self, name: &str, mut words: impl Iterator<Item = &'a str>) -> Step {
        let import = self.imports.get(name).ok_or_else(|| Trouble::wrong("no such import"))?;
        let number = |text: &str| text.parse::<u64>().map_err(Trouble::wrong);
        let sequence = number(words.next().unwrap_or_default())?;
        import.refresh(PATIENCE)?;
        import.wait_published(sequence, &self.stream, PATIENCE)?;
        let using = import.use_on(&self.stream)?;
        let errors = self.board.address(CHILD_DEVICE, 0, 0);
        for part in words {
            let mut numbers = part.split(':').map(number);
            let mut next = || numbers.next().unwrap_or_else(|| Err(Trouble::wrong("too short")));
            let (start, bytes, value) = (next()?, next()?, next()? as u32);
            let address = import.address_for(start..start + bytes)?;
            for words in Words::over(address, bytes, value).areas(false) {
                words.check(&self.stream, errors)?;
            }
        }
        drop(using);
        self.stream.synchronize()?;
        let wrong = self.board.read(CHILD_DEVICE, 0)?[0];
        if wrong > 0 {
            return Err(Trouble::Wrong(format!("{wrong} words of {name} are wrong here")));
        }
        let _alive = &self.machine;
        Ok(())
    }
}
