//! A client of an owner process.

use vmm_share::{
    Access, Address, Import, ImporterOptions, NamedBuffer, OwnerClient, OwnerDevice, ShareError,
};
use vmm_sys::{DeviceId, Transfer};

use super::reader::kind;
use super::second::Answers;
use super::{G, SOON, machine};

/// What the second process does as a worker.
pub(crate) fn answers(address: Address) -> Answers {
    let (sim, driver) = machine(2);
    let options = ImporterOptions::new(driver.clone()).timeout(SOON);
    let mut client = Some(OwnerClient::connect(&address, options).unwrap());
    let mut import: Option<Import> = None;
    Box::new(move |words| {
        if words == ["end"] {
            (import, client) = (None, None);
            // Memory that the owner process still has is not this one's.
            let left = sim.ledger_summary();
            let left = (left.handles, left.mappings, left.ranges);
            return Some(if left == (0, 0, 0) { "clean".to_owned() } else { format!("{left:?}") });
        }
        let client = client.as_ref()?;
        let mut done = || -> Result<String, ShareError> {
            Ok(match words {
                ["create", name, bytes, more @ ..] => {
                    let mut wanted = NamedBuffer::new(name, bytes.parse().unwrap())
                        .chunk_bytes(G)
                        .others_write(more.contains(&"others"))
                        .succeed(more.contains(&"succeed"));
                    if more.contains(&"second") {
                        let uuid = driver.device_uuid(DeviceId(1)).unwrap();
                        wanted = wanted.device(OwnerDevice::Uuid(uuid));
                    }
                    let (made, created) = client.create_or_find(&wanted)?;
                    let access = made.access();
                    import = Some(made);
                    format!("{} {access:?}", if created { "created" } else { "found" })
                }
                ["open", name, access] => {
                    let access = if *access == "rw" { Access::ReadWrite } else { Access::Read };
                    import = Some(client.open(name, access)?);
                    "opened".to_owned()
                }
                ["write", offset, value] => {
                    let (offset, value) = (offset.parse().unwrap(), value.parse().unwrap());
                    import.as_ref().unwrap().write(offset, &[value; 64])?;
                    "written".to_owned()
                }
                // Past all checks of this crate.
                ["force"] => {
                    let dst = import.as_ref().unwrap().address();
                    let byte = [9u8];
                    let copy = Transfer::HostToDevice { dst, src: byte.as_ptr(), bytes: 1 };
                    // SAFETY: the byte is readable, and the address is the driver's.
                    match unsafe { driver.copy(DeviceId(0), &copy) } {
                        Ok(()) => "written".to_owned(),
                        Err(error) => error.code().to_string(),
                    }
                }
                ["read", offset] => {
                    let mut byte = [0];
                    import.as_ref().unwrap().read(offset.parse().unwrap(), &mut byte)?;
                    byte[0].to_string()
                }
                ["alive"] => client.is_owner_alive().to_string(),
                ["check"] => format!("{:?}", import.as_ref().unwrap().check()),
                ["leave", name] => client.leave(name).map(|()| "left".to_owned())?,
                ["release", name] => client.release(name).map(|()| "released".to_owned())?,
                other => panic!("no such order: {other:?}"),
            })
        };
        Some(done().unwrap_or_else(|error| match error {
            ShareError::Refused { reason, .. } => format!("{reason:?}"),
            error => kind(&error),
        }))
    })
}
