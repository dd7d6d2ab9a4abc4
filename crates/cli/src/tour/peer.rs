//! The second process of the tour: maps the first one's buffer and checks it.
//!
//! Each line that comes is something to do, with the first of the words that the buffer should hold;
//! each line that goes says what was found, beginning with `ok` if that was right.

#![allow(unsafe_code)] // a copy into a mapping that only reads

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Duration;

use vmm_share::{Access, Address, Import, ImportState, Importer, ImporterOptions, ShareError};
use vmm_sys::{Driver, Transfer};

use super::telling::{Trouble, expect};

/// The name of the buffer.
pub(super) const NAME: &str = "tour";
const PATIENCE: Duration = Duration::from_secs(30);
/// Read at once.
const PART_BYTES: usize = 4 << 20;

/// Does what it is told until nothing more comes.
///
/// # Errors
/// Lines that cannot be read or written, and whatever keeps the buffer from being mapped.
pub fn peer(
    driver: &Arc<dyn Driver>,
    address: &Address,
    orders: impl BufRead,
    mut answers: impl Write,
) -> Result<(), Box<dyn std::error::Error>> {
    let importer =
        Importer::connect(address, ImporterOptions::new(driver.clone()).timeout(PATIENCE))?;
    let import = importer.open(NAME, Access::Read)?;
    for order in orders.lines() {
        let order = order?;
        let done = match order.split_once(' ') {
            Some(("check", value)) => check(&import, value.parse()?),
            Some(("changed", value)) => changed(&import, value.parse()?),
            _ if order == "write" => write(driver, &importer, &import),
            _ if order == "withdrawn" => withdrawn(&import),
            _ => Err(Trouble::wrong(format!("expected an order, found {order:?}"))),
        };
        match done {
            Ok(text) => writeln!(answers, "ok {text}")?,
            Err(trouble) => writeln!(answers, "{trouble}")?,
        }
        answers.flush()?;
    }
    Ok(())
}

/// Every word of the buffer.
fn check(import: &Import, value: u32) -> Result<String, Trouble> {
    let (bytes, mut wrong, mut offset) = (import.bytes(), 0u64, 0);
    let mut expected = value;
    let mut part = vec![0; PART_BYTES];
    while offset < bytes {
        let length = (bytes - offset).min(PART_BYTES as u64);
        let part = &mut part[..length as usize];
        import.read(offset, part)?;
        for word in part.chunks_exact(4) {
            wrong += u64::from(word != expected.to_le_bytes());
            expected = expected.wrapping_add(1);
        }
        offset += length;
    }
    expect(wrong == 0, "words as they were written", format_args!("{wrong} wrong"))?;
    Ok(bytes.to_string())
}

/// Writing is refused by the first process, by this crate's import, and by the driver.
fn write(
    driver: &Arc<dyn Driver>,
    importer: &Importer,
    import: &Import,
) -> Result<String, Trouble> {
    let asked = importer.open(NAME, Access::ReadWrite);
    expect(matches!(asked, Err(ShareError::Refused { .. })), "no access for writing", &asked)?;
    let written = import.write(0, &[0]);
    expect(matches!(written, Err(ShareError::NotPermitted { .. })), "no write", &written)?;
    let Some(device) = import.devices().first() else {
        return Err(Trouble::wrong("expected a device with access, found none"));
    };
    let byte = [0u8];
    let copy = Transfer::HostToDevice { dst: import.address(), src: byte.as_ptr(), bytes: 1 };
    // SAFETY: the byte is readable for the call, and the address is a mapping of this driver's.
    let copied = unsafe { driver.copy(*device, &copy) };
    expect(copied.is_err(), "the driver to refuse a copy into it", copied)?;
    Ok(String::new())
}

/// The owner has changed the memory: that is seen, nothing old is handed out, and then all is there.
fn changed(import: &Import, value: u32) -> Result<String, Trouble> {
    let state = import.check();
    expect(matches!(state, ImportState::Lagging { .. }), "an import that lags", state)?;
    let old = import.read(0, &mut [0]);
    expect(matches!(old, Err(ShareError::Lagging { .. })), "no old bytes", &old)?;
    let address = import.address();
    import.refresh(PATIENCE)?;
    let state = import.check();
    expect(state == ImportState::Current, "an import that is current", state)?;
    expect(import.address() == address, "the same address", import.address())?;
    check(import, value)
}

fn withdrawn(import: &Import) -> Result<String, Trouble> {
    let state = import.check();
    expect(state == ImportState::Withdrawn, "a buffer that was withdrawn", state)?;
    let used = import.read(0, &mut [0]);
    expect(matches!(used, Err(ShareError::Withdrawn { .. })), "no more use", &used)?;
    Ok(String::new())
}
