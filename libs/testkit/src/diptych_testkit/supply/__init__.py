"""What Diptych is made of, and whether it is still that: pins, hashes, licences, audit, SBOM."""
