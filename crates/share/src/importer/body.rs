//! What an import is made of, shared with the guards of its users.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use vmm_sys::DeviceId;
use vmm_sys::object::Event;

use super::Shared;
use super::leftovers;
use super::space::Space;
use super::uses::Uses;
use super::{Access, ImportState};
use crate::error::ShareError;
use crate::page::{Notice, NoticeReader};

#[derive(Debug)]
pub(super) struct Body {
    pub(super) shared: Arc<Shared>,
    pub(super) name: String,
    pub(super) export: u64,
    pub(super) access: Access,
    pub(super) devices: Vec<DeviceId>,
    pub(super) chunk_bytes: u64,
    pub(super) page: NoticeReader,
    /// The owner's, if it tells the order of its work by one.
    pub(super) event: Option<Event>,
    /// That of what is mapped.
    generation: AtomicU64,
    /// Held by whoever changes what is mapped.
    pub(super) change: Mutex<()>,
    /// `None` once it is with the leftovers.
    pub(super) space: Mutex<Option<Space>>,
    pub(super) uses: Arc<Uses>,
}

impl Body {
    pub(super) fn new(
        (shared, devices): (Arc<Shared>, Vec<DeviceId>),
        (name, export, access): (&str, u64, Access),
        (page, event, chunk_bytes): (NoticeReader, Option<Event>, u64),
        (space, generation): (Space, u64),
    ) -> Body {
        Body {
            shared,
            name: name.to_owned(),
            export,
            access,
            devices,
            chunk_bytes,
            page,
            event,
            generation: AtomicU64::new(generation),
            change: Mutex::new(()),
            space: Mutex::new(Some(space)),
            uses: Arc::default(),
        }
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    pub(super) fn set_generation(&self, generation: u64) {
        self.generation.store(generation, Ordering::Release);
    }

    pub(super) fn state(&self) -> ImportState {
        let Notice { generation: now, changing, withdrawn } = self.page.notice();
        let have = self.generation();
        match () {
            () if withdrawn => ImportState::Withdrawn,
            () if self.shared.link.is_gone() && (changing || now == have) => ImportState::OwnerGone,
            () if changing => ImportState::Changing,
            () if now == have => ImportState::Current,
            () => ImportState::Lagging { have, now },
        }
    }

    /// Refuses what is not the owner's memory any more. After the owner's end it is what it was.
    pub(super) fn check_current(&self, step: &'static str) -> Result<(), ShareError> {
        match self.state() {
            ImportState::Current | ImportState::OwnerGone => Ok(()),
            ImportState::Changing => Err(ShareError::Changing { step }),
            ImportState::Withdrawn => Err(ShareError::Withdrawn { step }),
            ImportState::Lagging { have, now } => Err(ShareError::Lagging { step, have, now }),
        }
    }

    /// Begins a use, if there is something to be used.
    pub(super) fn begin_use(&self, step: &'static str) -> Result<(), ShareError> {
        // Under the lock of the space, so that a refresh that swaps pieces has either seen the use, or
        // is seen by the check.
        let _space = self.space.lock();
        self.check_current(step)?;
        self.uses.begin();
        Ok(())
    }
}

impl Drop for Body {
    /// The last of handle and guards is gone.
    fn drop(&mut self) {
        if self.shared.driver.is_gone() {
            return;
        }
        let deadline = Instant::now() + self.shared.options.drop_patience;
        if let Some(space) = self.space.get_mut().take() {
            leftovers::end(space, &self.uses, deadline);
        }
    }
}
