"""Transfer engines: one interface (`inferkit.core.protocols.TransferEngine`), one file each."""
